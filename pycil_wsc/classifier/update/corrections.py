"""Images that come again with another class: the new one replaces the one that they were learned with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pycil_wsc.classifier.store.bookkeeping import Relabelled
from pycil_wsc.classifier.store.hashes import with_classes
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.memory.values import renumbered
from pycil_wsc.data.tasks.growing_dataset import kept
from pycil_wsc.data.types import Split
from pycil_wsc.training.learner_state import memory_of, stored_of, with_parts

NAMED = 3  # images that a line names


class Corrections(NamedTuple):
    """Images of a new task that were learned with another class.

    ``rows``: int64 (k,), their places in the task, ascending. ``former``: int64 (k,), the class, by number, that each
    was learned with; an image has several entries if several tasks have learned it with different classes.
    """

    rows: np.ndarray
    former: np.ndarray

    def of(self, entries: np.ndarray) -> Corrections:
        """Some of the entries."""
        return Corrections(self.rows[entries], self.former[entries])

    def first(self) -> Corrections:
        """One entry for each image."""
        return self.of(np.unique(self.rows, return_index=True)[1])


def corrections_in(
    digests: np.ndarray, labels: np.ndarray, names: Sequence[str], present: SavedLearner | None
) -> Corrections:
    """The images that ``present`` has learned with a class that they do not have now.

    Args:
        digests: of the new images (:func:`~pycil_wsc.classifier.store.hashes.digests_of`): int64 (N,).
        labels: (N,), their classes, by number of ``names``.
        names: the names of these classes.
        present: the learner before the task.
    """
    none = Corrections(np.empty(0, np.int64), np.empty(0, np.int64))
    if present is None or not len(digests):
        return none
    known = present.held.info.classes
    learned = present.bookkeeping.learned
    seen_before = np.flatnonzero(_is_in(digests, learned))
    if not len(seen_before):
        return none
    now = with_classes(digests, labels, names)
    parts = []
    for label in range(len(known)):
        mixed = with_classes(digests[seen_before], np.full(len(seen_before), label), known)
        rows = seen_before[_is_in(mixed, learned)]
        given_now = np.isin(with_classes(digests[rows], np.full(len(rows), label), known), now)
        parts.append((rows, np.full(len(rows), label), given_now))
    rows, former, given_now = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    wrong = np.isin(rows, rows[~given_now])
    pairs = zip(labels[rows].tolist(), former.tolist(), strict=True)
    has_same_name = np.array([names[label] == known[was] for label, was in pairs], bool)
    used = wrong & (~given_now | has_same_name)  # another file of this task may have the other class rightly
    return Corrections(rows, former).of(np.flatnonzero(used)[np.argsort(rows[used], kind="stable")])


def _is_in(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Whether each of the values is in a sorted array: bool (N,)."""
    if not len(ascending):
        return np.zeros(len(values), bool)
    places = np.searchsorted(ascending, values).clip(max=len(ascending) - 1)
    return ascending[places] == values


def without_former(learned: np.ndarray, digests: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The bookkeeping's ``learned`` without the classes, of these ``names``, of the images with these ``digests``."""
    if not len(digests):
        return learned
    gone = [with_classes(digests, np.full(len(digests), label), names) for label in range(len(names))]
    return np.setdiff1d(learned, np.concatenate(gone))


def without_exemplars(present: SavedLearner, gone: np.ndarray) -> SavedLearner:
    """``present`` without the exemplars for which ``gone``, bool (N,), is set; it is left as it is."""
    if not gone.any():
        return present
    held, numbers = kept(present.held, np.flatnonzero(~gone))
    learner = present.state["learner"]
    memory = StreamMemory if "slots" in memory_of(learner) else ExemplarMemory
    stored = {}
    for name, values in stored_of(learner).items():
        left = ~gone[values["indices"].numpy()]
        stored[name] = {part: tensor[left] for part, tensor in values.items()}
    exemplars = memory.renumbered(memory_of(learner), numbers)
    learner = with_parts(learner, memory=exemplars, stored=renumbered(stored, numbers))
    return present._replace(held=held, state={**present.state, "learner": learner})


def counted(
    corrections: Corrections, labels: np.ndarray, names: Sequence[str], known: Sequence[str]
) -> list[Relabelled]:
    """How many images changed from which class to which, for the history."""
    first = corrections.first()
    changes = zip(labels[first.rows].tolist(), first.former.tolist(), strict=True)
    pairs = Counter((known[int(was)], names[int(label)]) for label, was in changes)
    return [Relabelled(was=was, now=now, images=number) for (was, now), number in pairs.items()]


def called(split: Split, row: int) -> str:
    """What a line to the user calls an image: its file, or its position, counted from 0."""
    return f"image {row}" if split.in_memory else str(split.images[row])


def told(corrections: Corrections, split: Split, names: Sequence[str], known: Sequence[str], after: str) -> str:
    """A line that names the images, of which ``split`` has all of the task, and what comes of them ``after``."""
    first = corrections.first()
    some = []
    for row, was in zip(first.rows[:NAMED].tolist(), first.former[:NAMED].tolist(), strict=True):
        image = called(split, row)
        now = names[int(split.targets[row])]
        some.append(f"{image} (was '{known[was]}', now '{now}')")
    number = len(first.rows)
    more = ", ..." if number > NAMED else ""
    which = "1 image was" if number == 1 else f"{number} images were"
    return f"{which} learned as another class before: {', '.join(some)}{more}; {after}"
