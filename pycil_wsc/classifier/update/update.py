"""One update of a learner, in five steps: prepare, train, judge, record, publish.

Each step is a function of what the one before returned, and leaves that as it is. The learner that is updated stays as
it is, too: if a step fails, nothing has been learned.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pycil_wsc.classifier.predict.answers import Answers, numbers_of
from pycil_wsc.classifier.predict.calibration import fitted_temperature
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.predict.rebuild import config_with_weights_elsewhere
from pycil_wsc.classifier.store import learner_file
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping, Decision, Entry, Relabelled
from pycil_wsc.classifier.store.exemplar_files import check_exemplars
from pycil_wsc.classifier.store.hashes import Hashes, digests_of, hashes_of, with_classes
from pycil_wsc.classifier.store.saved_learner import SavedLearner, answers_of
from pycil_wsc.classifier.store.settings import configured, values_of
from pycil_wsc.classifier.update.comparison import decision_between, images_of_user, right
from pycil_wsc.classifier.update.corrections import Corrections
from pycil_wsc.classifier.update.folders import (
    Folders,
    begin_with,
    folder_of_updates,
    folders_of,
    read_rejection,
    refuse_others,
    remove_unfinished,
)
from pycil_wsc.classifier.update.gate import Accept
from pycil_wsc.classifier.update.held_out import check_usable, rows_of, set_aside, unseen_in
from pycil_wsc.classifier.update.kept_features import Choice, chosen, features_after
from pycil_wsc.classifier.update.known_images import learns_once, new_images
from pycil_wsc.classifier.update.progress_bar import ProgressBar
from pycil_wsc.classifier.update.source import part_of
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.configured import check_divided_memory, for_training, with_memory_size
from pycil_wsc.data.images.fingerprint import changed
from pycil_wsc.data.images.sources import Source
from pycil_wsc.data.memory.values import renumbered
from pycil_wsc.data.tasks.stream import extended, kept
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.files import write_json
from pycil_wsc.methods.consolidation.wsc import configured_learner
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.reproducibility import threads
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.run import Run, end_of, losses
from pycil_wsc.seeding import lock_of_threads
from pycil_wsc.training.learner import capacity_of
from pycil_wsc.training.learner_state import memory_of, stored_of, with_parts
from pycil_wsc.training.outputs import best_classes

ONE_AT_A_TIME = lock_of_threads()  # training draws from the random generators of the process


@dataclass(frozen=True, eq=False)
class Before:
    """What an update begins with.

    Args:
        config: the learner's configuration.
        learner: its state, or None before the first task.
        answers: its answers, likewise.
        per_class: images of each class to hold out.
        out: folder of the work, or None.
        bar: shows the progress.
        accept: the condition on which the update is kept, or None.
    """

    config: Config
    learner: SavedLearner | None
    answers: Answers | None
    per_class: int
    out: Path | None
    bar: ProgressBar
    accept: Accept | None

    @property
    def known(self) -> int:
        """The number of classes."""
        return len(self.learner.held.info.classes) if self.learner else 0

    @property
    def losses(self) -> list[list[float]]:
        """Those of the tasks so far, which tell learners apart."""
        return losses(self.learner.state["history"]) if self.learner else []


class UpdateResult(NamedTuple):
    """``state`` and ``answers`` of the updated learner, None if the update was rejected.

    ``decision``: that of the gate, None without one.
    """

    state: SavedLearner | None
    answers: Answers | None
    decision: Decision | None


def updated(before: Before, source: Source) -> UpdateResult:
    """Learn one more task, or load it if it was learned in ``out`` before."""
    started = time.perf_counter()
    prepared = prepare(before, source)
    with folder_of_updates(before.out) as folder:
        folders = folders_of(folder, len(prepared.config.tasks), _identity(prepared))
        if folders.rejection.is_file():  # first: ``saved`` may have the next update as this task
            return UpdateResult(None, None, read_rejection(folders.rejection))
        if learner_file.exists(folders.saved):
            remove_unfinished(folders.saved)
            return _restored(prepared, folders.saved)
        refuse_others(folders)
        trained = train(prepared, folders.work)
        judged = judge(trained)
        recorded = record(judged, started)
        return publish(recorded, folders)


# ---- prepare ---------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A task that can be learned.

    ``config``: with the task. ``stream``: the exemplars and the task's images, but for those held out. ``learner``: as
    before, without the exemplars that have another class now. ``bookkeeping``: with the task's images. ``hashes``: the
    SHA-256 of the image files that have been read. ``tests``: the user's images for the gate, if any.
    """

    before: Before
    config: Config
    stream: Dataset
    learner: SavedLearner | None
    bookkeeping: Bookkeeping
    hashes: Mapping[str, str]
    relabelled: list[Relabelled]
    tests: Split | None


def prepare(before: Before, source: Source) -> Prepared:
    """Read the images, leave out those that are known already, and hold some out.

    Images that are kept from earlier tasks with the same class are left out. Those that were learned with another
    class get the new one (:mod:`pycil_wsc.classifier.update.corrections`).
    """
    config, learner, say = before.config, before.learner, before.bar.say
    bookkeeping = dataclasses.replace(learner.bookkeeping if learner else Bookkeeping(), per_class=before.per_class)
    known = learner.hashes if learner else {}
    check_exemplars((learner.held.train, bookkeeping.held_out) if learner else (), known)
    part = part_of(source, config, say)
    hashes = Hashes(part.train, known)
    digests = digests_of(part.train, hashes) if part.train.in_memory else hashes.digests
    part, digests, corrections, learner, bookkeeping, relabelled = new_images(
        part, digests, learner, bookkeeping, config.model_name, say
    )
    held = learner.held if learner else None

    unseen = unseen_in(digests, corrections.rows, bookkeeping, hashes)
    counts = bookkeeping.counts(held.info.classes if held else ())
    aside = set_aside(part, unseen, counts, before.per_class, config.seed, len(config.tasks))
    stream = extended(held, dataclasses.replace(part, train=rows_of(part.train, ~aside)))
    stream = _with_former_classes(stream, corrections, aside)
    bookkeeping = _noting(bookkeeping, part, stream, digests, aside)

    config = dataclasses.replace(config, tasks=(*config.tasks, part.info.name))
    config = with_memory_size(config, stream.train.images)
    _check_memory(config, held, len(stream.info.classes))
    tests = images_of_user(before.accept, held, bookkeeping.held_out, stream, config, say) if before.accept else None
    return Prepared(before, config, stream, learner, bookkeeping, hashes, relabelled, tests)


def _with_former_classes(stream: Dataset, corrections: Corrections, aside: np.ndarray) -> Dataset:
    """``stream`` with the former classes of the images of its last task; those set ``aside`` are not in it."""
    assert stream.arrivals is not None
    first = len(stream.train) - int((~aside).sum())
    samples = first + np.cumsum(~aside)[corrections.rows] - 1
    pairs = np.stack([samples, corrections.former], axis=1)
    return dataclasses.replace(stream, arrivals=dataclasses.replace(stream.arrivals, relearned=pairs))


def _noting(
    bookkeeping: Bookkeeping, part: Dataset, stream: Dataset, digests: np.ndarray, aside: np.ndarray
) -> Bookkeeping:
    """``bookkeeping`` with the images of a task: those set ``aside`` are held out, and the others learned."""
    held_out = rows_of(part.train, aside)
    check_usable(held_out, stream.info)
    labels = numbers_of(held_out.targets, part.info.classes, stream.info.classes)
    bookkeeping = bookkeeping.with_images(held_out.images, labels)
    learned = np.concatenate([digests, with_classes(digests, part.train.targets, part.info.classes)])
    learned = learned[np.tile(~aside, 2)]
    return dataclasses.replace(
        bookkeeping,
        learned=np.union1d(bookkeeping.learned, learned),
        images=np.union1d(bookkeeping.images, digests[~aside]),
    )


def _check_memory(config: Config, held: Dataset | None, classes: int) -> None:
    """Raise a :class:`UserError` if the memory would lose all of its exemplars, as it cannot hold one per class."""
    method = configured_learner(config).Plan(config)
    if held is None or not len(held.train) or method.measures_quotas:  # the last: checked when the task is planned
        return
    remedy = "save the learner, and load it with a larger {key}"
    size = capacity_of(config, method, classes)
    check_divided_memory(config, classes, f"{classes} classes", remedy, size)


# ---- train -----------------------------------------------------------------------------------------------------------


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
    if before.out is not None:
        begin_with(before.per_class, work)
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


# ---- judge -----------------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """What the trained learner answers, and whether that is good enough.

    ``answers``: with calibrated probabilities. ``held_out``: images that the task has not trained on, their
    ``features``, and ``correct``, whether each is classified correctly. ``decision``: of the gate, None without one.
    """

    trained: Trained
    answers: Answers
    held_out: Split
    features: Features
    correct: np.ndarray
    decision: Decision | None


def judge(trained: Trained) -> Judged:
    """Compare the trained learner with the one before, and calibrate it.

    A held-out image that came again with another class has been trained on. It is still compared on, with its former
    class, and then no longer held out.
    """
    prepared = trained.prepared
    held_out = prepared.bookkeeping.held_out
    answers = answers_of(prepared.config, trained.learner, trained.lent)
    values, logits = _outputs(answers, held_out)
    correct = best_classes(logits)[:, 0].numpy() == held_out.targets
    decision = _decision(prepared, trained.learner, answers, correct)
    digests = digests_of(held_out, prepared.hashes)
    unseen = ~np.isin(digests, prepared.bookkeeping.learned)
    held_out = rows_of(held_out, unseen)
    features = Features.of(values[unseen], held_out.targets, digests[unseen], held_out=True)
    if len(held_out):
        temperature = fitted_temperature(logits.numpy()[unseen], held_out.targets)
        answers = Answers(answers.classifier, answers.classes, temperature)
    return Judged(trained, answers, held_out, features, correct[unseen], decision)


def _outputs(answers: Answers, split: Split) -> tuple[np.ndarray, torch.Tensor]:
    """Features and logits of images: float32 numpy (n, d), and float32 (n, classes), on the CPU."""
    outputs = [(features.cpu(), logits.cpu()) for features, logits in answers.classifier.outputs(split.images)]
    if not outputs:
        return np.empty((0, 0), np.float32), torch.empty(0, len(answers.classes))
    features, logits = zip(*outputs, strict=True)
    return torch.cat(features).numpy(), torch.cat(logits)


def _decision(prepared: Prepared, learner: SavedLearner, answers: Answers, correct: np.ndarray) -> Decision | None:
    """The gate's decision about the updated ``learner``; None without a gate."""
    before = prepared.before
    if before.accept is None:
        return None
    exemplars = prepared.learner.held.train if prepared.learner else None
    return decision_between(
        before.accept,
        (before.answers, answers),
        (exemplars, learner.held.train),
        prepared.bookkeeping.held_out,
        prepared.tests,
        correct,
    )


# ---- record ----------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """``learner``: with its bookkeeping about the task. ``answers``: with the features that it keeps."""

    judged: Judged
    learner: SavedLearner
    answers: Answers


def record(judged: Judged, started: float) -> Recorded:
    """Note the task, which began at ``started``, for the history, and what is held out from now on."""
    learner, prepared = judged.trained.learner, judged.trained.prepared
    entry = _entry(judged)
    entry["seconds"] = time.perf_counter() - started
    if judged.decision:
        entry = {**entry, **judged.decision}
    features = _features(judged)
    bookkeeping = dataclasses.replace(
        prepared.bookkeeping,
        held_out=judged.held_out,
        temperature=judged.answers.temperature,
        entries=(*prepared.bookkeeping.entries, entry),
        features=features,
    )
    answers = Answers(judged.answers.classifier, judged.answers.classes, judged.answers.temperature, features=features)
    return Recorded(judged, learner._replace(bookkeeping=bookkeeping), answers)


def _features(judged: Judged) -> Features:
    """Those that the learner keeps, if images are held out; by these alone can unknown classes be told."""
    is_rejected = judged.decision is not None and not judged.decision["accepted"]
    if is_rejected or not len(judged.held_out):
        return Features()
    trained = judged.trained
    learned = trained.prepared.stream.train
    digests = digests_of(learned, trained.prepared.hashes)
    classifier = judged.answers.classifier
    return features_after(trained.choice, judged.features, learned, digests, classifier, trained.noted)


def _entry(judged: Judged) -> Entry:
    """What the history tells of the task."""
    learner, prepared = judged.trained.learner, judged.trained.prepared
    known = prepared.before.known
    images = (learner.held.fingerprint or {})["tasks"][-1]
    entry: Entry = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "data": {"name": prepared.config.tasks[-1], "images": images["train"], "sha256": images["sha256"]},
        "classes": judged.answers.classes[known:],
    }
    if prepared.relabelled:
        entry["relabelled"] = prepared.relabelled
    if len(judged.held_out):
        is_old, correct = judged.held_out.targets < known, judged.correct
        parts = {"known": correct[is_old], "new": correct[~is_old], "all": correct}
        entry["accuracies"] = {name: 100 * float(part.mean()) for name, part in parts.items() if len(part)}
    return entry


# ---- publish ---------------------------------------------------------------------------------------------------------


def publish(recorded: Recorded, folders: Folders) -> UpdateResult:
    """Put the updated learner, or the rejection, where the next start of the script finds it."""
    judged = recorded.judged
    has_folder = judged.trained.prepared.before.out is not None
    if judged.decision and not judged.decision["accepted"]:
        shutil.rmtree(folders.work, ignore_errors=True)
        if has_folder:  # last: what is in ``work`` is then the next update's
            write_json(folders.rejection, judged.decision)
        return UpdateResult(None, None, judged.decision)
    if has_folder:
        learner_file.write(folders.work, recorded.learner)
        os.rename(folders.work, folders.saved)
        remove_unfinished(folders.saved)
    return UpdateResult(recorded.learner, recorded.answers, judged.decision)


# ---- an update that was made before ----------------------------------------------------------------------------------


def _identity(prepared: Prepared) -> str:
    """Identifies the update: settings, images, the learner before it, and the gate with its images."""
    before, tests = prepared.before, prepared.tests
    gate = before.accept.settings() if before.accept else None
    parts = [repr(prepared.config.identity()), prepared.stream.fingerprint, before.losses, gate, before.per_class]
    if tests is not None:
        pixels = hashlib.sha256(tests.images.tobytes()).hexdigest() if tests.in_memory else None
        parts.append([tests.targets.tolist(), pixels, hashes_of((tests,), {})])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _restored(prepared: Prepared, saved: Path) -> UpdateResult:
    """Load the learner that an earlier process saved in ``saved``, if it was trained on the same task.

    That process may have had another gate: the decision is made anew.
    """
    before, config = prepared.before, prepared.config
    learner, _ = learner_file.read(saved)
    same = configured(learner.config, tasks=config.tasks).identity() == config.identity()
    if not same or learner.bookkeeping.per_class != before.per_class:
        raise UserError(f"{saved}: was learned with other settings; choose another folder 'out'")
    if losses(learner.state["history"][:-1]) != before.losses:
        raise UserError(f"{saved}: was learned from another learner; choose another folder 'out'")
    difference = changed(learner.held.fingerprint, prepared.stream.fingerprint)
    if difference:
        raise UserError(f"{saved}: was learned from other images ({difference}); choose another folder 'out'")
    before.bar.say(f"task {len(config.tasks)} was learned before: loaded from {saved}")
    learner = learner._replace(config={"tasks": list(config.tasks)})
    answers = answers_of(config, learner)
    if before.accept is None:
        return UpdateResult(learner, answers, None)
    decision = _decision(prepared, learner, answers, right(answers, prepared.bookkeeping.held_out))
    assert decision
    if not decision["accepted"]:
        return UpdateResult(None, None, decision)
    *others, entry = learner.bookkeeping.entries or (Entry(),)
    entries = (*others, {**entry, **decision})
    bookkeeping = dataclasses.replace(learner.bookkeeping, entries=entries)
    return UpdateResult(learner._replace(bookkeeping=bookkeeping), answers, decision)
