"""The third step of an update: the learner is calibrated, and compared with the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.classifier.predict.calibration import fitted_temperature
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.store.bookkeeping import Decision, OfClass
from pycil_wsc.classifier.store.hashes import digests_of
from pycil_wsc.classifier.store.saved_learner import SavedLearner, answers_of
from pycil_wsc.classifier.update.gate import Accept, decided
from pycil_wsc.classifier.update.held_out import rows_of
from pycil_wsc.classifier.update.prepare import Prepared
from pycil_wsc.classifier.update.train import Trained
from pycil_wsc.data.types import Split
from pycil_wsc.training.outputs import best_classes

REFUSED = 0.05  # of the images of known classes


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

    @property
    def is_rejected(self) -> bool:
        """Whether the gate rejects the update."""
        return self.decision is not None and not self.decision["accepted"]


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
    decision = decision_of(prepared, trained.learner, answers, correct)
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


def decision_of(prepared: Prepared, learner: SavedLearner, answers: Answers, correct: np.ndarray) -> Decision | None:
    """The gate's decision about the updated ``learner``; None without a gate."""
    before = prepared.before
    if before.accept is None:
        return None
    exemplars = prepared.learner.held.train if prepared.learner else None
    return _decision_between(
        before.accept,
        (before.answers, answers),
        (exemplars, learner.held.train),
        prepared.bookkeeping.held_out,
        prepared.tests,
        correct,
    )


def _decision_between(
    accept: Accept,
    answers: tuple[Answers | None, Answers],
    exemplars: tuple[Split | None, Split],
    held_out: Split,
    images: Split | None,
    correct: np.ndarray,
) -> Decision:
    """The gate's decision between the learner before the update and the one after it.

    Args:
        accept: the condition.
        answers: of the learner before and after; None before the first task.
        exemplars: of the learner before and after.
        held_out: the images that are held out, with classes by number.
        images: those of :func:`~pycil_wsc.classifier.update.prepare.images_of_user`.
        correct: whether the new learner classifies each held-out image correctly: bool (N,).
    """
    answers_before, answers_after = answers
    known = len(answers_before.classes) if answers_before else 0
    if images is not None:
        on, old, new = "images of your own", images, images
    elif (held_out.targets < known).any() or not known and len(held_out):
        on, old, new = "held-out images", held_out, held_out
    else:  # old exemplars: both models were trained on them
        on, new = "exemplars, which were trained on", exemplars[1]
        old = new if exemplars[0] is None else exemplars[0]
    is_old, is_new = old.targets < known, new.targets >= known
    if new is held_out:
        after = correct[is_old], correct[is_new]
    else:
        after = right(answers_after, rows_of(old, is_old)), right(answers_after, rows_of(new, is_new))
    before = right(answers_before, rows_of(old, is_old)) if answers_before else np.empty(0, bool)
    decision = decided(accept, (before, after[0]), after[1], len(answers_after.classes), on)
    targets = old.targets[is_old], new.targets[is_new]
    decision["gate"]["classes"] = _by_class(answers_after.classes, targets, before, after)
    refused = _refused(answers_before, rows_of(new, is_new)) if answers_before else None
    if refused is not None:
        decision["gate"]["refused"] = refused
    return decision


def _by_class(
    names: Sequence[str],
    targets: tuple[np.ndarray, np.ndarray],
    before: np.ndarray,
    after: tuple[np.ndarray, np.ndarray],
) -> dict[str, OfClass]:
    """The accuracy on each class that has images; the pairs are of known classes and of new ones."""
    by_class = {}
    for part, (labels, right_after) in enumerate(zip(targets, after, strict=True)):
        for label in np.unique(labels).tolist():
            of_class = labels == label
            was = None if part else 100 * float(before[of_class].mean())
            now = 100 * float(right_after[of_class].mean())
            by_class[names[label]] = OfClass(images=int(of_class.sum()), before=was, after=now)
    return by_class


def _refused(answers: Answers, split: Split) -> float | None:
    """The percentage of images of unknown classes that are refused; None if there are none, or it cannot be told."""
    known = answers.known_if_any
    if known is None or not len(split) or len(known.scores) < 1 / REFUSED - 1:
        return None
    return 100 * float((answers.familiarity(split.images) <= REFUSED).mean())


def right(answers: Answers, split: Split) -> np.ndarray:
    """Whether each image is classified correctly: bool (N,)."""
    return answers.classifier.predict(split.images) == split.targets
