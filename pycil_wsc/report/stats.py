"""Means over seeds, their spread, and which differences chance does not explain."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95  # of the intervals by which a difference counts

Seeds = pd.Series  # a measure's value for each seed


def quantile(freedom: float) -> float:
    """How many standard errors a two-sided interval of ``LEVEL`` reaches to each side, by Student's t."""
    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def is_ahead(differences: Seeds) -> bool:
    """Whether the interval of the mean difference is above 0. One difference has no interval."""
    count = len(differences)
    if count < 2:
        return False
    return bool(differences.mean() > quantile(count - 1) * differences.sem())


def best(candidates: Mapping[Hashable, Seeds]) -> set[Hashable]:
    """The candidate with the highest mean, and all that it is not ahead of.

    Candidates are compared over the seeds that both have or, if these are fewer than two, by the difference of their
    means (Welch). Those with a single seed are ignored. With fewer than two candidates, the result is empty.
    """
    measured = {name: seeds for name, seeds in candidates.items() if len(seeds) > 1}
    if len(measured) < 2:
        return set()
    top = max(measured, key=lambda name: measured[name].mean())
    return {name for name, seeds in measured.items() if name == top or not _behind(seeds, measured[top])}


def _behind(ours: Seeds, top: Seeds) -> bool:
    differences = (top - ours).dropna()  # of the seeds that both have
    if len(differences) > 1:
        return is_ahead(differences)
    return is_above(_summary(top), _summary(ours))


def _summary(seeds: Seeds) -> Summary:
    values = seeds.to_numpy(float)
    return Summary(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))), len(values))


class Summary(NamedTuple):
    """What is published of a measure: its mean over ``count`` seeds, and the standard error of the mean."""

    mean: float
    error: float
    count: int


def is_above(ours: Summary, theirs: Summary) -> bool:
    """Whether the interval of the difference between two means over unrelated seeds is above 0 (Welch's test).

    A single seed has no interval, nor has a mean without a standard error.
    """
    if min(ours.count, theirs.count) < 2:
        return False
    variances = np.array([ours.error**2, theirs.error**2])
    total = float(variances.sum())
    if not total:
        return ours.mean > theirs.mean
    counts = np.array([ours.count, theirs.count])
    freedom = total**2 / float((variances**2 / (counts - 1)).sum())
    return bool(ours.mean - theirs.mean > quantile(freedom) * math.sqrt(total))
