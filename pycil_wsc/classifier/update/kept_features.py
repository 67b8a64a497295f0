"""Which images' features a learner keeps after a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.features import Features, joined
from pycil_wsc.data.types import Split

PER_CLASS = 50  # learned images of each class
MOST = 5000  # learned images in all, if that leaves one for each class


class Choice(NamedTuple):
    """Images whose features are kept: ``old`` features, and the ``rows`` of a task's images, int64 (k,)."""

    old: Features
    rows: np.ndarray


def chosen(before: Features, learned: Split, digests: np.ndarray, stays: bool) -> Choice:
    """The learned images whose features are kept after a task.

    Of each class, those with the smallest digests: which these are does not depend on the order in which images came,
    nor on other classes.

    Args:
        before: what was kept before the task.
        learned: the images that the task is trained on, exemplars included.
        digests: of these images, (n,).
        stays: whether the backbone stays, so that features still hold. Otherwise those of classes that have no image in
            ``learned`` are kept as they are, as there are no better ones.
    """
    old = before.rows(~before.held_out & ~np.isin(before.digests, digests))
    if not stays:
        old = old.rows(~np.isin(old.labels, learned.targets))
    labels = np.concatenate([old.labels, learned.targets])
    classes = max(1, len(np.unique(labels)))
    number = max(1, min(PER_CLASS, MOST // classes))
    places = smallest_of_classes(labels, np.concatenate([old.digests, digests]), number)
    return Choice(old.rows(places[places < len(old)]), places[places >= len(old)] - len(old))


def features_after(
    choice: Choice,
    held_out: Features,
    learned: Split,
    digests: np.ndarray,
    classifier: Classifier,
    noted: Mapping[int, np.ndarray],
) -> Features:
    """The features to keep after a task.

    Of a class whose learned images are gone, such as an old one of a network whose features have grown, half of the
    held-out images stand for them. They no longer count as held out when it is told what is unknown.

    Args:
        choice: of images.
        held_out: those of the images that are held out now.
        learned: as for :func:`chosen`.
        digests: likewise.
        classifier: the learner's network after the task.
        noted: row -> features (d,), of images that need not be classified again.
    """
    old, rows = choice
    if len(old) and old.values.shape[1] != held_out.values.shape[1]:  # of a network that has grown since
        old = Features()
    missing = np.array([row for row in rows.tolist() if row not in noted], np.int64)
    known = dict(zip(missing.tolist(), classifier.features(learned.images[missing]), strict=True))
    values = [noted[row] if row in noted else known[row] for row in rows.tolist()]
    stacked = np.stack(values) if values else np.empty((0, 0), np.float32)
    new = Features.of(stacked, learned.targets[rows], digests[rows], held_out=False)
    old = old.rows(~np.isin(old.digests, held_out.digests))
    return joined([old, new, _half_as_learned(held_out, np.concatenate([old.labels, new.labels]))])


def _half_as_learned(held_out: Features, labels: np.ndarray) -> Features:
    """``held_out``, in which half of each class that is not among ``labels``, at least one, counts as learned."""
    is_held_out = held_out.held_out.copy()
    for label in np.setdiff1d(held_out.labels, labels):
        places = np.flatnonzero(held_out.labels == label)
        by_digest = places[np.argsort(held_out.digests[places])]
        is_held_out[by_digest[: (len(places) + 1) // 2]] = False
    return dataclasses.replace(held_out, held_out=is_held_out)


def smallest_of_classes(labels: np.ndarray, digests: np.ndarray, number: int) -> np.ndarray:
    """The places of the ``number`` smallest different digests of each class, ascending."""
    order = np.lexsort((digests, labels))
    labels, digests = labels[order], digests[order]
    is_repeated = np.zeros(len(order), bool)
    is_repeated[1:] = (labels[1:] == labels[:-1]) & (digests[1:] == digests[:-1])
    order, labels = order[~is_repeated], labels[~is_repeated]
    rank = np.arange(len(labels)) - np.searchsorted(labels, labels)
    return np.sort(order[rank < number])
