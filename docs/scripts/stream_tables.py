"""The tables of replay methods in streams: results/studies/one_pass on docs/streams.md, and results/studies/streams on
docs/abundant.md.

python docs/scripts/generate.py
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.report.texts import method_name  # noqa: E402
from pycil_wsc.results.run_table import Row, read  # noqa: E402

STUDIES = ROOT / "results" / "studies"
SIZES = {1: "4 %", 10: "40 %", 25: "100 %"}  # exemplars per class, of 25 images
SLOTS = (500, 2000, 5000)
Runs = dict[str, dict[int, dict[int, Row]]]  # {row's name: {memory: {seed: run}}}


def one_pass() -> list[tuple[str, ...]]:
    """Average accuracy and area under the curve, the header first: ER's, and differences from it."""
    runs = grouped("one_pass", one_pass_name)
    if not runs:
        return []
    header = ("method", *(f"{slots:,}" for slots in SLOTS), *(f"AUC, {slots:,}" for slots in SLOTS))
    lines: list[tuple[str, ...]] = [header]
    for name, sizes in runs.items():
        accuracies = [cell(sizes, runs["ER"], slots, "average") for slots in SLOTS]
        areas = [cell(sizes, runs["ER"], slots, "anytime_auc") for slots in SLOTS]
        lines.append((name, *accuracies, *areas))
    return lines


def one_pass_name(run: Row) -> str:
    """The name of a row of the table of one pass."""
    name = method_name(run["method"])
    if run.get("consolidate"):
        return f"{name} with WSC"
    if run.get("steps_per_batch", 1) > 1:
        return f"{name}, {run['steps_per_batch']} steps a batch"
    return name


def several_passes() -> list[tuple[str, ...]]:
    """Average accuracy at Replay's operations, the header first: Replay's, and differences from it."""
    runs = grouped("streams", several_passes_name)
    if not runs:
        return []
    lines: list[tuple[str, ...]] = [("method", "memory filled", *SIZES.values())]
    for name, sizes in runs.items():
        method, _, filled = name.partition(" | ")
        lines.append((method, filled, *(cell(sizes, runs["Replay | after a task"], size, "average") for size in SIZES)))
    return lines


def several_passes_name(run: Row) -> str:
    """The name of a row of the table of several passes, and when the memory is filled."""
    in_steps = run.get("memory_update", "step") == "step" and run["method"] != "replay"
    return f"{method_name(run['method'])} | {'in each step' if in_steps else 'after a task'}"


def grouped(study: str, name: Callable[[Row], str]) -> Runs:
    """The runs of results/studies/``study`` by the name of their row, their memory and their seed."""
    table = STUDIES / study / "table.csv"
    runs: Runs = {}
    for run in read(table) if table.exists() else []:
        seeds = runs.setdefault(name(run), {}).setdefault(run["memory"], {})
        assert run["seed"] not in seeds, f"two runs of {name(run)} with memory {run['memory']} and seed {run['seed']}"
        seeds[run["seed"]] = run
    return runs


def cell(sizes: Mapping[int, Mapping[int, Row]], baseline: Mapping[int, Mapping[int, Row]], size: int, key: str) -> str:
    """The mean over seeds, for the baseline itself, or the mean difference from it over equal seeds."""
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
