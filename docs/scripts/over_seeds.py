"""The rows of tables that compare runs over equal seeds."""

import functools
import statistics
import sys
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.results.run_table import Row, read  # noqa: E402

STUDIES = ROOT / "results" / "studies"
Name = TypeVar("Name", bound=Hashable)
OfMethod = Mapping[int, Mapping[int, Row]]  # {memory: {seed: run}}


@functools.cache
def recorded(study: str, name: str = "table") -> list[Row]:
    """The runs in the table ``name`` of results/studies/``study``; none if it does not exist."""
    path = STUDIES / study / f"{name}.csv"
    return read(path) if path.exists() else []


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
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:{sign}.2f}"
    half = reach(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return difference(mean, half) if sign else f"{mean:.2f} ± {half:.2f}"


def difference(mean: float, half: float) -> str:
    """A mean difference with its interval, bold if that excludes 0."""
    text = f"{mean:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(mean) > half else text
