"""The rows of tables that compare runs over equal seeds."""

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.results.run_table import Row, read  # noqa: E402

STUDIES = ROOT / "results" / "studies"
OfMethod = Mapping[int, Mapping[int, Row]]  # {memory: {seed: run}}


def grouped(study: str, name: Callable[[Row], str | None]) -> dict[str, dict[int, dict[int, Row]]]:
    """The runs of results/studies/``study`` by the name of their row, their memory and their seed, if it has a name."""
    table = STUDIES / study / "table.csv"
    runs: dict[str, dict[int, dict[int, Row]]] = {}
    for run in read(table) if table.exists() else []:
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
    """A mean with its 95 % interval; a difference that excludes 0 is bold."""
    if not values:
        return "–"
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:{sign}.2f}"
    half = reach(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    text = f"{mean:{sign}.2f} ± {half:.2f}"
    return f"**{text}**" if sign and abs(mean) > half else text
