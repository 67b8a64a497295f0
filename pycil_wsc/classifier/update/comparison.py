"""The learner before an update and the one after it, compared on images that the gate may use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycil_wsc.classifier.predict.answers import Answers, numbers_of
from pycil_wsc.classifier.store.bookkeeping import Decision, OfClass
from pycil_wsc.classifier.update.gate import EXEMPLARS, Accept, decided
from pycil_wsc.classifier.update.held_out import check_usable, rows_of
from pycil_wsc.classifier.update.known_images import Say
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.images.image_files import line_of
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError

REFUSED = 0.05  # of the images of known classes


def images_of_user(
    accept: Accept, before: Dataset | None, held_out: Split, stream: Dataset, config: Config, say: Say
) -> Split | None:
    """The user's images for the gate, with classes by number; None without any.

    Args:
        accept: the condition, which names the images.
        before: the exemplars of the learner before the update, None before the first task.
        held_out: the images that are held out.
        stream: the task that is learned, with all classes.
        config: of the learner.
        say: shows a line about files that are left out.

    Raises:
        UserError: if the gate has no image of a known class.
    """
    known = 0 if before is None else len(before.info.classes)
    if isinstance(accept.on, str) and accept.on == EXEMPLARS:
        if before is not None and not len(before.train) and not (held_out.targets < known).any():
            raise UserError(
                f"accept: there is no image of a known class to compare on: '{config.model_name}' keeps no "
                "exemplars, and no image is held out; give Accept(on=...) some, or begin with held_out=20"
            )
        return None
    data = read_source(accept.on, config.data_root)
    line = line_of(data.left_out)
    if line:
        say(f"accept: {line}")
    split = data.test if len(data.test) else data.train
    labels = numbers_of(split.targets, data.info.classes, stream.info.classes)
    has_class = labels >= 0
    if known and not (has_class & (labels < known)).any():
        raise UserError(f"accept: {data.info.name} has no image of a class that was learned before; add some")
    images = Split(split.images[has_class], labels[has_class])
    check_usable(images, stream.info)
    return images


def decision_between(
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
        images: those of :func:`images_of_user`.
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
