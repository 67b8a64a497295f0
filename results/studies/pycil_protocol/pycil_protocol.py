"""Batch norm over four parts of a batch, in PyCIL's protocol: a table of docs/results.md, from this folder's records.

python docs/scripts/generate.py
"""

import json
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
    """The header and the rows: of each seed with both, the accuracy with four parts minus that of the whole batch."""
    gains = {}
    for seed, curve in sorted(curves_of(recorded("pycil_protocol")).items()):
        if len(curve) == 2:
            gain = [four - whole for four, whole in zip(curve[4][:TASKS], curve[1][:TASKS], strict=True)]
            gains[seed] = [*gain, statistics.fmean(gain)]
    header = ("seed", *(f"after task {task}" for task in range(1, TASKS + 1)), "mean")
    lines = [(str(seed), *(f"{value:+.2f}" for value in gain)) for seed, gain in gains.items()]
    return [header, *lines, ("all", *(spread(list(values), "+") for values in zip(*gains.values(), strict=True)))]


def curves_of(runs: list[Row]) -> Curves:
    """The curves of these ``runs``, and of replay.json, which has the whole batch, another seed and all ten tasks."""
    longer = json.loads((HERE / "replay.json").read_text())
    curves: dict[int, dict[int, list[float]]] = {longer["config"]["seed"]: {1: longer["curve"]}}
    for run in runs:
        curves.setdefault(run["seed"], {})[run["batch_norm_parts"]] = after_each_task(run, "accuracy")
    return curves
