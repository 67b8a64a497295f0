"""A learner between two tasks, and what it answers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.classifier.predict.classifier import Classifier, precision_of_answers
from pycil_wsc.classifier.predict.predictor import for_prediction
from pycil_wsc.classifier.predict.rebuild import Reached, config_with_weights_elsewhere, rebuilt
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.types import Dataset
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.state import State


class SavedLearner(NamedTuple):
    """A learner after a task: what its folder has.

    ``config``: the configuration's values; ``held``: the exemplars, as a stream without test images; ``state``: that of
    :meth:`pycil_wsc.runs.run.Run.state`; ``hashes``: the SHA-256 of the exemplars' files by name;
    ``bookkeeping``: see :class:`~pycil_wsc.classifier.store.bookkeeping.Bookkeeping`.
    """

    config: State
    held: Dataset
    state: State
    hashes: dict[str, str]
    bookkeeping: Bookkeeping = Bookkeeping()


def answers_of(config: Config, learned: SavedLearner, lent: Backbone | None = None) -> Answers:
    """What a learner with this configuration and state answers. Raises an exception if they do not fit together.

    ``lent``: the backbone that earlier answers predict with, if the state has its weights; these then do so, too.
    """
    assert learned.held.arrivals is not None
    info, seen = learned.held.info, learned.held.arrivals.seen
    reached = Reached.of_stream(seen)
    config = dataclasses.replace(config_with_weights_elsewhere(config), tasks=tuple(learned.config["tasks"]))
    learner = for_prediction(rebuilt(config, info, reached, learned.state["learner"], lent=lent))
    if lent is not None:
        learner.network.backbone = lent
    classifier = Classifier(learner, info, reached.classes, config.num_workers, precision_of_answers(learner))
    noted = learned.bookkeeping
    return Answers(classifier, info.classes, noted.temperature, features=noted.features)
