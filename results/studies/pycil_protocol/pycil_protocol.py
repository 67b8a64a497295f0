"""Batch norm over four parts of a batch, in PyCIL's protocol: a table of docs/results.md, from this folder's records.

python docs/scripts/generate.py
"""

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "scripts"))

from over_seeds import Row, after_each_task, recorded, spread

HERE = Path(__file__).parent
TASKS = 3
Curves = Mapping[int, Mapping[int, Sequence[float]]]  # {seed: {parts of a batch: accuracy after each task}}


def rows() -> list[tuple[str, ...]]:
    """The header and the rows: of each seed, the accuracy with four parts minus that of the whole batch."""
    return rows_of({**of_longer_runs(), **of_table(recorded("pycil_protocol"))})


def of_longer_runs() -> Curves:
    """Seed 1993, whose runs were not stopped after the third task."""
    whole = json.loads((HERE / "replay.json").read_text())
    four = re.findall(r"classes: CNN ([\d.]+)", (HERE / "replay-four-parts.log").read_text())
    return {whole["config"]["seed"]: {1: whole["curve"], 4: [float(accuracy) for accuracy in four]}}


def of_table(runs: list[Row]) -> Curves:
    """The curves in table.csv."""
    curves: dict[int, dict[int, list[float]]] = {}
    for run in runs:
        curves.setdefault(run["seed"], {})[run["batch_norm_parts"]] = after_each_task(run, "accuracy")
    return curves


def rows_of(curves: Curves) -> list[tuple[str, ...]]:
    """The rows of these ``curves``, of each seed that has both."""
    gains = {}
    for seed, curve in sorted(curves.items()):
        if len(curve) == 2:
            gain = [four - whole for four, whole in zip(curve[4][:TASKS], curve[1][:TASKS], strict=True)]
            gains[seed] = [*gain, statistics.fmean(gain)]
    header = ("seed", *(f"after task {task}" for task in range(1, TASKS + 1)), "mean")
    lines = [(str(seed), *(f"{value:+.2f}" for value in gain)) for seed, gain in gains.items()]
    return [header, *lines, ("all", *(spread(list(values), "+") for values in zip(*gains.values(), strict=True)))]
