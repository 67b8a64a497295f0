"""The second step of an update: the learner is trained on the task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.predict.rebuild import config_with_weights_elsewhere
from pycil_wsc.classifier.store.hashes import digests_of, hashes_of
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.store.settings import values_of
from pycil_wsc.classifier.update.kept_features import Choice, chosen
from pycil_wsc.classifier.update.known_images import learns_once
from pycil_wsc.classifier.update.prepare import Prepared
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.memory.values import renumbered
from pycil_wsc.data.tasks.growing_dataset import kept
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.reproducibility import threads
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.run import Run, end_of
from pycil_wsc.training.learner_state import memory_of, stored_of, with_parts


class Trained(NamedTuple):
    """``learner``: trained on the task, with its exemplars chosen; its bookkeeping is still empty.

    ``choice``: the images whose features it keeps. ``noted``: those features that were computed anyway, by row.
    ``lent``: the backbone that was used for it, if that predicts already.
    """

    prepared: Prepared
    learner: SavedLearner
    choice: Choice
    noted: dict[int, np.ndarray]
    lent: Backbone | None


def train(prepared: Prepared, work: Path) -> Trained:
    """Train on the last task of the stream, with checkpoints in ``work`` if the learner has a folder of its own."""
    before, stream = prepared.before, prepared.stream
    state = prepared.learner.state if prepared.learner else None
    config = dataclasses.replace(prepared.config, cache_first_task=False)
    if state and not configured_learner(config).Plan.starts_anew:
        config = config_with_weights_elsewhere(config)  # the state already has the weights
    check_backbone(config, stream.info.image_size)
    data = for_training(stream, config)
    lent = _backbone_to_lend(prepared)
    run = Run(config, data, before.bar, work, state, checkpoints=before.out is not None, lent=lent)
    choice = _choice(prepared)
    if learns_once(config.model_name):  # its backbone stays, and every image passes through it once
        run.learner.outputs.wanted = choice.rows
    before.bar.begin(run.plan)
    with before.bar, threads(config.threads):
        run.learn()
    memory = run.learner.memory
    held, numbers = kept(stream, memory.indices)
    state = run.state(end_of(run.manager.tasks[-1]))
    learned = state["learner"]
    exemplars = memory.renumbered(memory_of(learned), numbers)
    state["learner"] = with_parts(learned, memory=exemplars, stored=renumbered(stored_of(learned), numbers))
    hashes = hashes_of((held.train, prepared.bookkeeping.held_out), prepared.hashes)
    learner = SavedLearner(values_of(before.config, prepared.config.tasks), held, state, hashes)
    return Trained(prepared, learner, choice, run.learner.outputs.noted, lent)


def _backbone_to_lend(prepared: Prepared) -> Backbone | None:
    """The backbone that predicts, if it is where the task is learned, and no task changes it after the first."""
    answers, config = prepared.before.answers, prepared.config
    if answers is None or not learns_once(config.model_name):
        return None
    is_in_place = answers.device == numbered(resolved_device(config.device))
    return answers.backbone if is_in_place else None


def _choice(prepared: Prepared) -> Choice:
    """The images whose features are kept: none if no image is held out, as they are then of no use."""
    learned = prepared.stream.train
    if not len(prepared.bookkeeping.held_out):
        return Choice(Features(), np.empty(0, np.int64))
    digests = digests_of(learned, prepared.hashes)
    stays = learns_once(prepared.config.model_name)
    return chosen(prepared.bookkeeping.features, learned, digests, stays)
