"""Means over seeds, their spread, and which differences chance does not explain."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

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
    variances = np.array([ours.sem() ** 2, top.sem() ** 2])
    counts = np.array([len(ours), len(top)])
    total = float(variances.sum())
    if not total:
        return bool(top.mean() > ours.mean())
    freedom = total**2 / float((variances**2 / (counts - 1)).sum())
    return bool(top.mean() - ours.mean() > quantile(freedom) * math.sqrt(total))
