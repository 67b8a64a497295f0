"""Labels that are probably wrong: images that are much more like another class than like their own."""

from __future__ import annotations

import numpy as np

FEWEST = 5  # images of a class, without which its mean says little
MARGIN = 0.3  # by which the cosine with another class's mean exceeds that with the own one


def doubtful(
    features: np.ndarray,
    labels: np.ndarray,
    known: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Images whose label is probably wrong, and the class that each is more like: rows (k,) and classes (k,).

    Features are centred and have length 1. An image is compared by cosine with the mean of each class, without itself
    in its own, and doubted if another class is nearer by more than ``MARGIN``. The most doubtful ones come first.

    Args:
        features: float (n, d).
        labels: int64 (n,). Classes of fewer than five images, ``known`` ones included, are left out.
        known: features (m, d) and labels (m,) of further images, which count for the means and are not doubted.
    """
    number_of_new = len(labels)
    if known is not None:
        features = np.concatenate([features, known[0]])
        labels = np.concatenate([labels, known[1]])
    classes, number = np.unique(labels, return_counts=True)
    rows = np.flatnonzero(np.isin(labels, classes[number >= FEWEST]))
    classes, places, number = np.unique(labels[rows], return_inverse=True, return_counts=True)
    if len(classes) < 2:
        return rows[:0], labels[:0]
    directions = _unit(features[rows] - features[rows].mean(0))
    sums = np.zeros((len(classes), directions.shape[1]))
    np.add.at(sums, places, directions)
    is_new = rows < number_of_new
    rows, places, directions = rows[is_new], places[is_new], directions[is_new]
    cosines = directions @ _unit(sums).T
    to_class = (directions * _unit(sums[places] - directions)).sum(1)
    cosines[np.arange(len(rows)), places] = -np.inf
    excess = cosines.max(1) - to_class
    order = np.argsort(-excess, kind="stable")
    order = order[excess[order] > MARGIN]
    return rows[order], classes[cosines.argmax(1)[order]]


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, or 0."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
