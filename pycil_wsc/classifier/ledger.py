"""What a learner keeps besides its weights and exemplars: images for checking it, and a note about each task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np

from pycil_wsc.classifier.gate import Gate
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.seeding import derived_seed

ONE_OF = 5  # at most every fifth image of a class is held out
NO_IMAGES = Split(np.empty(0, str), np.empty(0, np.int64))


class Data(TypedDict):
    """The images that a task was learned from."""

    name: str
    images: int
    sha256: str


class Relabelled(TypedDict):
    """Images that a task has learned with another class than an earlier one, of which they take the place."""

    was: str
    now: str
    images: int


class Entry(TypedDict, total=False):
    """What is noted about a task. The last three are those of :class:`~pycil_wsc.classifier.gate.Decision`."""

    when: str
    data: Data
    classes: list[str]  # new ones
    relabelled: list[Relabelled]  # if there are any
    accuracies: dict[str, float]  # in percent, on held-out images of "known", "new" and "all" classes
    seconds: float
    accepted: bool
    reason: str
    gate: Gate


@dataclass(frozen=True, eq=False)
class Ledger:
    """Belongs to one state of a learner, and is saved with it.

    Args:
        held_out: images that no task has trained on, with their classes by number, for calibration, the gate and the
            test of drift.
        per_class: the number of images of each class to hold out.
        temperature: by which the logits are divided before they become probabilities.
        entries: what was noted about each task, in order; the tasks that an earlier version learned have none.
        learned: the digests of the images that tasks have trained on, which are not held out when they come again
            (:func:`~pycil_wsc.classifier.copies.digests_of`), and those of the images with their classes
            (:func:`~pycil_wsc.classifier.copies.with_classes`): int64 (N,), ascending. Earlier versions noted the
            first only of tasks with ``per_class``, and the others only for methods that learn each image once.
    """

    held_out: Split = NO_IMAGES
    per_class: int = 0
    temperature: float = 1.0
    entries: Sequence[Entry] = field(default=())
    learned: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def counts(self, classes: Sequence[str]) -> dict[str, int]:
        """The number of held-out images of each class."""
        found = np.bincount(self.held_out.targets, minlength=len(classes))
        return dict(zip(classes, found.tolist(), strict=True))

    def with_images(self, images: np.ndarray, labels: np.ndarray) -> Ledger:
        """This ledger with further held-out images."""
        if not len(labels):
            return self
        before = self.held_out
        both = [before.images, images] if len(before) else [images]
        return replace(self, held_out=Split(np.concatenate(both), np.concatenate([before.targets, labels])))


def set_aside(
    part: Dataset, unseen: np.ndarray, counts: Mapping[str, int], per_class: int, seed: int, task: int
) -> np.ndarray:
    """Hold out images of a task, at random, until there are ``per_class`` of each class.

    At most a fifth of a class's images are taken, so that a small class is trained on.

    Args:
        part: the task's images.
        unseen: bool (N,), which of them may be held out: no task has trained on them.
        counts: class -> the number of its images that are held out already.
        per_class: how many there should be.
        seed: of the random choice, with ``task``, which is counted from 0.

    Returns:
        The images that are held out: bool (N,).
    """
    rng = np.random.default_rng(derived_seed(seed, "held out", task))
    taken = np.zeros(len(part.train), bool)
    for label, name in enumerate(part.info.classes):
        rows = rng.permutation(np.flatnonzero(part.train.targets == label))
        wanted = max(0, per_class - counts.get(name, 0))
        free = rows[unseen[rows]]
        taken[free[: min(wanted, len(rows) // ONE_OF)]] = True
    return taken


def problem_of(ledger: Ledger, classes: int, tasks: int) -> str:
    """The part of a ledger read from a file that does not fit a learner with this number of ``classes`` and ``tasks``.

    "" if all parts fit.
    """
    labels = ledger.held_out.targets
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        return "held-out images"
    if type(ledger.per_class) is not int or ledger.per_class < 0:
        return "number of held-out images"
    if ledger.learned.dtype != np.int64 or ledger.learned.ndim != 1:
        return "digests"
    if type(ledger.temperature) is not float or not 0 < ledger.temperature < math.inf:
        return "temperature"
    if len(ledger.entries) > tasks or not all(map(_is_entry, ledger.entries)):
        return "history"
    return ""


def _is_entry(value: object) -> bool:
    """Whether a value from a file is an :class:`Entry`."""
    if not isinstance(value, dict):
        return False
    data = value.get("data")
    if data is not None and not (isinstance(data, dict) and _has(data, {"name": str, "images": int, "sha256": str})):
        return False
    classes = value.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return False
    kinds = {"when": str, "accuracies": dict, "seconds": float, "accepted": bool, "reason": str, "gate": dict}
    return _has(value, {name: kind for name, kind in kinds.items() if name in value})


def _has(values: Mapping[str, object], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())
