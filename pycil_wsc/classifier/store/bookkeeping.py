"""What a learner keeps besides its weights and exemplars: images for checking it, and a note about each task."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
from typing_extensions import NotRequired

from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.store.perceptual import PerceptualHashes
from pycil_wsc.data.images.paths import concatenated
from pycil_wsc.data.types import Split

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


class Done(TypedDict):
    """``did``: "renamed", "merged", "removed" or "relabelled"; ``classes``: the names of these classes before."""

    did: str
    classes: list[str]


class ClassChange(Done, total=False):
    """What was done to classes after a task, other than by learning."""

    when: str
    to: str  # the name that they have now, of all but removed ones
    images: int  # that were relabelled


class Accuracy(TypedDict):
    """Accuracy in percent ``after`` an update, over ``images`` images; ``interval``: its lower and upper bound."""

    images: int
    after: float
    interval: list[float]


class Change(Accuracy):
    """Also ``before``, and the ``drop`` with its ``interval`` and the p-value ``p`` of a test for ``max_drop``."""

    before: float
    drop: float
    p: float


class OfClass(TypedDict):
    """Accuracy in percent on a class ``before`` an update, None if the class is new, and ``after``; over ``images``."""

    images: int
    before: float | None
    after: float


class Gate(TypedDict):
    """What an update was judged ``on``, and the accuracies on ``old`` and ``new`` classes, None without images.

    ``classes``: those on each class, by name. ``refused``: the percentage of images of the new classes that the learner
    before would have refused with ``unknown=0.05``, if it could.
    """

    classes: dict[str, OfClass]
    on: str
    old: Change | None
    new: Accuracy | None
    refused: NotRequired[float]


class Decision(TypedDict):
    """Whether an update is ``accepted``, and the ``reason``, a sentence."""

    accepted: bool
    reason: str
    gate: Gate


class Entry(TypedDict, total=False):
    """What is noted about a task. The last three are those of :class:`Decision`."""

    when: str
    data: Data
    classes: list[str]  # new ones
    relabelled: list[Relabelled]  # if there are any
    changes: list[ClassChange]  # after the task, likewise
    accuracies: dict[str, float]  # in percent, on held-out images of "known", "new" and "all" classes
    seconds: float
    accepted: bool
    reason: str
    gate: Gate


@dataclass(frozen=True, eq=False)
class Bookkeeping:
    """Belongs to one state of a learner, and is saved with it.

    Args:
        held_out: images that no task has trained on, with their classes by number, for calibration, the gate and the
            test of drift.
        per_class: the number of images of each class to hold out.
        temperature: by which the logits are divided before they become probabilities.
        entries: what was noted about each task, in order.
        learned: the digests of the images that tasks have trained on, which are not held out when they come again
            (:func:`~pycil_wsc.classifier.store.hashes.digests_of`), and those of the images with their classes
            (:func:`~pycil_wsc.classifier.store.hashes.with_classes`): int64 (N,), ascending.
        images: of ``learned``, the digests of the images alone: int64 (N,), ascending.
        perceptual: the perceptual hashes of the learned and held-out images.
        features: of the held-out images and of some learned ones of each class; none if no image is held out.
        notes: the user's (``Learner.notes``), in JSON.
    """

    held_out: Split = NO_IMAGES
    per_class: int = 0
    temperature: float = 1.0
    entries: Sequence[Entry] = field(default=())
    learned: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    images: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    perceptual: PerceptualHashes = field(default_factory=PerceptualHashes)
    features: Features = field(default_factory=Features)
    notes: str = "{}"

    def counts(self, classes: Sequence[str]) -> dict[str, int]:
        """The number of held-out images of each class."""
        counts = np.bincount(self.held_out.targets, minlength=len(classes))
        return dict(zip(classes, counts.tolist(), strict=True))

    def with_images(self, images: np.ndarray, labels: np.ndarray) -> Bookkeeping:
        """This bookkeeping with further held-out images."""
        if not len(labels):
            return self
        before = self.held_out
        both = [before.images, images] if len(before) else [images]
        return replace(self, held_out=Split(concatenated(both), np.concatenate([before.targets, labels])))


def problem_of(bookkeeping: Bookkeeping, classes: int, tasks: int) -> str:
    """The part of what was read from a file that does not fit a learner with this many ``classes`` and ``tasks``.

    "" if all parts fit.
    """
    labels = bookkeeping.held_out.targets
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        return "held-out images"
    if type(bookkeeping.per_class) is not int or bookkeeping.per_class < 0:
        return "number of held-out images"
    for digests in (bookkeeping.learned, bookkeeping.images):
        if digests.dtype != np.int64 or digests.ndim != 1:
            return "digests"
    if type(bookkeeping.temperature) is not float or not 0 < bookkeeping.temperature < math.inf:
        return "temperature"
    if len(bookkeeping.entries) != tasks or not all(map(_is_entry, bookkeeping.entries)):
        return "history"
    if not isinstance(json.loads(bookkeeping.notes), dict):
        return "notes"
    return bookkeeping.perceptual.problem or bookkeeping.features.problem(classes)


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
    changes = value.get("changes", [])
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        return False
    kinds = {"when": str, "accuracies": dict, "seconds": float, "accepted": bool, "reason": str, "gate": dict}
    return _has(value, {name: kind for name, kind in kinds.items() if name in value})


def _has(values: Mapping[str, object], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())
