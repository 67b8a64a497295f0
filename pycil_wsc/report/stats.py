"""Means over seeds, their spread, and whether two methods differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

Seeds = Mapping[Hashable, float]  # a measure's value for each seed


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of the mean; the error is None for a single value."""
    deviation = standard_deviation(values)
    return statistics.fmean(values), None if deviation is None else deviation / len(values) ** 0.5


def standard_deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n - 1 degrees of freedom); None for a single value."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


class Difference(NamedTuple):
    """Mean of the differences over equal seeds, its standard error (None for one seed), and each seed's difference."""

    mean: float
    error: float | None
    by_seed: Seeds


def paired(ours: Seeds, theirs: Seeds) -> Difference | None:
    """``ours`` minus ``theirs``, seed by seed; None if they share no seed."""
    by_seed = {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}
    return Difference(*mean_and_error(list(by_seed.values())), by_seed) if by_seed else None


def best(candidates: Mapping[Hashable, Seeds]) -> set[Hashable]:
    """The candidate with the highest mean, and all that are within one standard error of the difference to it.

    The standard error is that of the paired difference or, if two candidates share fewer than two seeds, that of the
    difference of their means. Candidates with a single seed have no error and are ignored. With fewer than two
    candidates, the result is empty.
    """
    measured = {name: seeds for name, seeds in candidates.items() if len(seeds) > 1}
    if len(measured) < 2:
        return set()
    top = max(measured, key=lambda name: statistics.fmean(measured[name].values()))
    return {name for name, seeds in measured.items() if name == top or not _below(seeds, measured[top])}


def _below(ours: Seeds, top: Seeds) -> bool:
    """Whether ``ours`` is below ``top`` by more than the standard error of their difference."""
    difference = paired(ours, top)
    if difference is not None and difference.error is not None:
        return -difference.mean > difference.error
    (mean, error), (highest, its_error) = mean_and_error(list(ours.values())), mean_and_error(list(top.values()))
    return highest - mean > math.hypot(error or 0.0, its_error or 0.0)
