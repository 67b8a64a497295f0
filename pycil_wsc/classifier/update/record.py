"""The fourth step of an update: what the learner notes about the task, and keeps of it."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import NamedTuple

from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.store.bookkeeping import Entry
from pycil_wsc.classifier.store.hashes import digests_of
from pycil_wsc.classifier.store.perceptual import PerceptualHashes
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.update.judge import Judged
from pycil_wsc.classifier.update.kept_features import features_after


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
        perceptual=_perceptual(judged),
        features=features,
    )
    answers = Answers(judged.answers.classifier, judged.answers.classes, judged.answers.temperature, features=features)
    return Recorded(judged, learner._replace(bookkeeping=bookkeeping), answers)


def _perceptual(judged: Judged) -> PerceptualHashes:
    """The perceptual hashes of all images so far."""
    prepared = judged.trained.prepared
    perceptual = prepared.bookkeeping.perceptual
    if judged.is_rejected:
        return perceptual
    for split in (prepared.stream.train, judged.held_out):
        perceptual = perceptual.with_images(split, prepared.hashes, prepared.config.num_workers)
    return perceptual


def _features(judged: Judged) -> Features:
    """Those that the learner keeps, if images are held out; by these alone can unknown classes be told."""
    if judged.is_rejected or not len(judged.held_out):
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
