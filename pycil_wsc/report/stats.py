"""Which differences between means over seeds chance does not explain."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95  # of the intervals by which a difference counts
Numbers = TypeVar("Numbers", float, pd.Series)


def reach(freedom: Numbers) -> Numbers:
    """How many standard errors a two-sided interval of ``LEVEL`` reaches to each side, by Student's t."""
    return stdtrit(freedom, (1 + LEVEL) / 2)


def is_ahead(differences: pd.Series) -> bool:
    """Whether the interval of the mean difference is above 0. One difference has no interval."""
    count = differences.count()
    return bool(count > 1 and differences.mean() > reach(count - 1) * differences.sem())


def apart(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.Series:
    """Whether the interval of the difference between two means over unrelated seeds excludes 0 (Welch's test).

    Both have the columns ``mean``, ``error`` and ``count``. A single seed has no interval, nor has a mean without a
    standard error.
    """
    squares, their_squares = ours["error"] ** 2, theirs["error"] ** 2
    variance = squares + their_squares
    freedom = variance**2 / (squares**2 / (ours["count"] - 1) + their_squares**2 / (theirs["count"] - 1))
    width = reach(freedom.fillna(1)) * np.sqrt(variance)  # without any variance, every difference counts
    return (ours["mean"] - theirs["mean"]).abs() > width


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
    return bool(apart(_summary(top), _summary(ours)).iloc[0])


def _summary(seeds: pd.Series) -> pd.DataFrame:
    return pd.DataFrame({"mean": [seeds.mean()], "error": [seeds.sem()], "count": [seeds.count()]})
