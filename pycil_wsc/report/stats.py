"""Which differences between means over seeds chance does not explain."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95  # of the intervals by which a difference counts
Summary = tuple[float, float, int]  # a mean over seeds, its standard error, and the number of seeds


def reach(freedom: float) -> float:
    """How many standard errors a two-sided interval of ``LEVEL`` reaches to each side, by Student's t."""
    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def is_ahead(differences: pd.Series) -> bool:
    """Whether the interval of the mean difference is above 0. One difference has no interval."""
    count = differences.count()
    return bool(count > 1 and differences.mean() > reach(count - 1) * differences.sem())


def is_above(ours: Summary, theirs: Summary) -> bool:
    """Whether the interval of the difference between two means over unrelated seeds is above 0 (Welch's test).

    A single seed has no interval, nor has a mean without a standard error.
    """
    (mean, error, count), (other, other_error, others) = ours, theirs
    if min(count, others) < 2:
        return False
    variance = error**2 + other_error**2
    if not variance:
        return mean > other
    freedom = variance**2 / (error**4 / (count - 1) + other_error**4 / (others - 1))
    return mean - other > reach(freedom) * math.sqrt(variance)


def best(candidates: Mapping[Hashable, pd.Series]) -> list[Hashable]:
    """The candidate with the highest mean, and all that it is not ahead of. A candidate is a value for each seed.

    Candidates are compared over the seeds that both have or, if these are fewer than two, by the difference of their
    means (Welch). Those with a single seed are ignored. With fewer than two candidates, the result is empty.
    """
    measured = {name: seeds for name, seeds in candidates.items() if seeds.count() > 1}
    if len(measured) < 2:
        return []
    top = max(measured.values(), key=lambda seeds: seeds.mean())
    return [name for name, seeds in measured.items() if seeds is top or not _behind(seeds, top)]


def _behind(ours: pd.Series, top: pd.Series) -> bool:
    differences = (top - ours).dropna()  # of the seeds that both have
    if len(differences) > 1:
        return is_ahead(differences)
    return is_above(_summary(top), _summary(ours))


def _summary(seeds: pd.Series) -> Summary:
    return float(seeds.mean()), float(seeds.std() / math.sqrt(seeds.count())), int(seeds.count())
