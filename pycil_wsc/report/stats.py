"""Whether differences between means over seeds are significant. Frames have a row per mean and a column per seed."""

import numpy as np
import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95  # confidence of the intervals by which a difference counts


def reach(freedom: float | pd.Series) -> float | pd.Series:
    """How many standard errors a two-sided interval of ``LEVEL`` reaches to each side, by Student's t."""
    return stdtrit(freedom, (1 + LEVEL) / 2)


def is_ahead(differences: pd.DataFrame) -> pd.Series:
    """Whether the interval of each mean difference is above 0. One difference has no interval."""
    return differences.mean(axis=1) > reach(differences.count(axis=1) - 1) * differences.sem(axis=1)


def apart(rows: pd.DataFrame, other_rows: pd.DataFrame) -> pd.Series:
    """Whether the interval of the difference between two means over unrelated seeds excludes 0 (Welch's test).

    Both have the columns ``mean``, ``standard_error`` and ``averaged_over``. A single seed has no interval, nor has a
    mean without a standard error.
    """
    squares = rows["standard_error"] ** 2
    their_squares = other_rows["standard_error"] ** 2
    variance = squares + their_squares
    terms = squares**2 / (rows["averaged_over"] - 1) + their_squares**2 / (other_rows["averaged_over"] - 1)
    freedom = (variance**2 / terms).fillna(1)  # without any variance, every difference counts
    return (rows["mean"] - other_rows["mean"]).abs() > reach(freedom) * np.sqrt(variance)


def best(seeds: pd.DataFrame) -> pd.Index:
    """The rows that no other row is ahead of.

    Rows are compared over the seeds that both have or, if these are fewer than two, by the difference of their means
    (Welch). Those with a single seed are ignored. If no row is ahead of another, the result is empty.
    """
    seeds = seeds.loc[seeds.count(axis=1) > 1]
    if len(seeds) < 2:
        return seeds.index[:0]
    means = pd.DataFrame({"mean": seeds.mean(axis=1), "standard_error": seeds.sem(axis=1)})
    means["averaged_over"] = seeds.count(axis=1)
    behind = pd.Series(False, seeds.index)
    for other in seeds.index:
        differences = seeds.rsub(seeds.loc[other], axis="columns")
        paired = differences.count(axis=1) > 1
        higher = means["mean"] < means.loc[other, "mean"]
        behind |= is_ahead(differences).where(paired, apart(means, means.loc[other]) & higher)
    return seeds.index[~behind] if behind.any() else seeds.index[:0]
