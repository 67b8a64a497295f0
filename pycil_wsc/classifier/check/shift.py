"""Whether images come from where the known ones came from: a two-sample test on features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 999
FEWEST = 8  # images on each side


@dataclass(frozen=True)
class Shift:
    """The result of a two-sample test between new images and known ones.

    ``distance``: the maximum mean discrepancy of their features, 0 to about 1.4. ``p``: the p-value of the permutation
    test, small if the images differ. ``alarm``: whether ``p`` is at most the level of the test. ``images`` and
    ``known``: how many new and known images were compared.
    """

    distance: float
    p: float
    alarm: bool
    images: int
    known: int


def compared(
    new: tuple[np.ndarray, np.ndarray],
    known: tuple[np.ndarray, np.ndarray],
    level: float,
    rng: np.random.Generator,
) -> Shift | None:
    """Test whether two sets of images of the same classes have the same distribution of features.

    The statistic is the maximum mean discrepancy with a Gaussian kernel, whose width is the median distance (A. Gretton
    et al., *A Kernel Two-Sample Test*, JMLR 2012). Each class has the same weight in both sets, and permutations stay
    within a class, so a different mix of classes is not a shift. Without a shift, the probability of an alarm is at
    most ``level``, whatever the features are, provided that the network was trained on neither set.

    Args:
        new: features (n, d) and classes (n,).
        known: features (m, d) and classes (m,). Classes that one side lacks are left out.
        level: the largest ``p`` of an alarm.
        rng: source of the permutations.

    Returns:
        None if one of the sets has fewer than eight images of classes that both have.
    """
    shared = np.intersect1d(new[1], known[1])
    rows, others = np.isin(new[1], shared), np.isin(known[1], shared)
    count, reference = int(rows.sum()), int(others.sum())
    if min(count, reference) < FEWEST:
        return None
    features = np.concatenate([new[0][rows], known[0][others]]).astype(np.float64)
    classes = np.concatenate([new[1][rows], known[1][others]])
    weights = _weights(classes, np.arange(len(classes)) < count)
    by_class = [np.flatnonzero(classes == label) for label in shared]
    drawn = np.stack([weights, *(_permuted(weights, by_class, rng) for _ in range(PERMUTATIONS))], axis=1)
    squares = np.einsum("ij,ij->j", drawn, _kernel(features) @ drawn)
    least = squares[0] * (1 - 1e-9)  # equal up to rounding counts as equal
    p = float((squares >= least).mean())
    return Shift(math.sqrt(max(0.0, squares[0])), p, p <= level, count, reference)


def _weights(classes: np.ndarray, is_new: np.ndarray) -> np.ndarray:
    """The weight of each image in the difference of the two means: each class counts by its share of all images."""
    weights = np.empty(len(classes))
    for label in np.unique(classes):
        of_class = classes == label
        share = of_class.mean()
        weights[of_class & is_new] = share / (of_class & is_new).sum()
        weights[of_class & ~is_new] = -share / (of_class & ~is_new).sum()
    return weights


def _permuted(weights: np.ndarray, by_class: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """``weights`` in a random order within each class, whose places are given."""
    mixed = weights.copy()
    for places in by_class:
        mixed[places] = weights[rng.permutation(places)]
    return mixed


def _kernel(features: np.ndarray) -> np.ndarray:
    """The Gaussian kernel of each pair of rows, of the width of their median distance: (n, n)."""
    lengths = (features**2).sum(1)
    squares = np.maximum(0.0, lengths[:, None] + lengths - 2 * features @ features.T)
    median = float(np.median(squares[np.triu_indices(len(squares), 1)]))
    return np.exp(-squares / (median or 1.0))
