"""The rows of tables that compare runs over equal seeds, and their Markdown."""

import functools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.results.run_table import Row, read  # noqa: E402

LEVEL = 0.05  # of the tests after Holm's correction
STUDIES = ROOT / "results" / "studies"
Name = TypeVar("Name", bound=Hashable)
OfMethod = Mapping[int, Mapping[int, Row]]  # {memory: {seed: run}}


@functools.cache
def recorded(study: str, name: str = "table") -> list[Row]:
    """The runs in the table ``name`` of results/studies/``study``; none if it does not exist."""
    path = STUDIES / study / f"{name}.csv"
    return read(path) if path.exists() else []


def after_each_task(run: Row, measure: str) -> list[float]:
    """A measure of :data:`~pycil_wsc.results.run_table.BY_TASK` after each task; empty if the run lacks it."""
    values = []
    while (value := run.get(f"{measure}_{len(values) + 1}")) is not None:
        values.append(value)
    return values


def grouped(study: str, name: Callable[[Row], Name | None]) -> dict[Name, dict[int, dict[int, Row]]]:
    """The runs of results/studies/``study`` by the name of their row, their memory and their seed, if it has a name."""
    runs: dict[Name, dict[int, dict[int, Row]]] = {}
    for run in recorded(study):
        row = name(run)
        if row is None:
            continue
        seeds = runs.setdefault(row, {}).setdefault(run["memory"], {})
        assert run["seed"] not in seeds, f"two runs of {row} with memory {run['memory']} and seed {run['seed']}"
        seeds[run["seed"]] = run
    return runs


def beside(sizes: OfMethod, baseline: OfMethod, size: int, key: str) -> str:
    """The mean of a column over seeds, for the baseline itself, or the mean difference from it over equal seeds."""
    runs, others = sizes.get(size, {}), baseline.get(size, {})
    if sizes is baseline:
        return spread([run[key] for run in runs.values()], "")
    return spread([run[key] - others[seed][key] for seed, run in runs.items() if seed in others], "+")


def spread(values: list[float], sign: str) -> str:
    """A mean with its 95 % interval; with the sign "+" of a difference."""
    if not values:
        return "–"
    if sign and len(values) > 1:
        return difference(*interval(values))
    return estimate(values, sign)


def estimate(values: Collection[float], sign: str = "") -> str:
    """A mean with its 95 % interval, if it has one."""
    mean, half = interval(values)
    text = f"{mean:{sign}.2f}"
    return text if math.isnan(half) else f"{text} ± {half:.2f}"


def interval(values: Collection[float]) -> tuple[float, float]:
    """The mean over seeds, and the half-width of its 95 % interval by Student's t; NaN for a single seed."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    half = reach(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(half)


def difference(mean: float, half: float) -> str:
    """A mean difference with its interval, bold if that excludes 0."""
    text = f"{mean:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(mean) > half else text


@functools.cache
def detectable(count: int) -> float:
    """The true difference that a test of ``count`` pairs at 5 % detects with a probability of 0.8, in half-widths."""
    from scipy.optimize import brentq
    from scipy.stats import nct

    limit = reach(count - 1)
    found: Any = brentq(lambda difference: nct.sf(limit, count - 1, difference * limit) - 0.8, 0.5, 3)
    return float(found)


def kept_by_holm(chances: Mapping[Name, float]) -> set[Name]:
    """Those of {name: probability without a difference} that stay significant after Holm's correction.

    These are the smallest probabilities, up to the first that is above ``LEVEL`` over the number of those left.
    """
    kept: set[Name] = set()
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        if chances[name] > LEVEL / (len(chances) - place):
            break
        kept.add(name)
    return kept


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])
