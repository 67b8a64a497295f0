"""The runs of exps/studies/night as a table of runs for docs/scripts/findings.py, and what they say of the order of the
methods.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from findings import Group, cells, papers_table  # of docs/scripts, as over_seeds is
from over_seeds import after_each_task
from scipy.stats import kendalltau

from pycil_wsc.results.identity import STUDIED
from pycil_wsc.results.run_table import Row

SEEDS = 5
IMAGES = 25  # of each class
CLASSES = 50
THREE = (4, 40, 100)  # the fractions of memory of the studies of WSC
DISTILLING, EXPANDING = ("icarl", "bic", "wa"), ("der", "foster", "memo")
OTHERS = (*DISTILLING, *EXPANDING)
EIGHT = ("replay", "wsc", *OTHERS)


def in_setting(rows: Group, setting: str) -> Group:
    """The rows of the same methods in another setting."""
    return tuple(f"{row} {setting}" for row in rows)


def table_of(runs: Sequence[Row]) -> pd.DataFrame:
    """A line per run: its row, the fraction of the images that its memory keeps, its seed and its measures."""
    table = []
    for run in runs:
        share = round(100 * run["memory"] / IMAGES)
        row = {"row": row_name(run), "share": share, "seed": run["seed"], "classes": classes_of(run)}
        table.append(row | measures(run))
    return pd.DataFrame(table, columns=["row", "share", "seed", "classes", *MEASURES, *OF_LATER_TASKS])


def classes_of(run: Row) -> int:
    """The number of classes that a run learns over all of its tasks."""
    tasks = len(after_each_task(run, "accuracy"))
    if "increment" not in run:  # the same in all runs of the table
        return CLASSES
    return run["init_cls"] + run["increment"] * (tasks - 1)


def row_name(run: Row) -> str:
    """The method, and in what the run differs from those of the main table: ``wsc retain=0.1 average=False``."""
    parts = [run["method"]]
    for name, usual in STUDIED.items():
        value = run.get(name)
        if value not in (None, usual):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            parts.append(f"{name.removeprefix('wsc.')}={text}")
    tasks = len(after_each_task(run, "accuracy"))
    if tasks != 10:
        parts.append(f"tasks={tasks}")
    if run["method"] == "joint" and run["epochs"] < run["init_epoch"]:
        parts.append("in Replay's schedule")
    if run.get("operations_like"):
        parts.append("equal operations")
    return " ".join(parts)


MEASURES = ("average", "first", "later", "newest", "forgetting", "flops", "images", "trained_last")
OF_LATER_TASKS = {  # columns of the runs' table that are means over all tasks but the first
    "loss": "train_loss",
    "trained": "train_accuracy",
    "cosine": "gradient_cosine",
    "gradient": "gradient_norm",
    "drift": "drift",
}


def measures(run: Row) -> dict[str, float]:
    """The measures of a run: ``first`` and ``later`` are the accuracy after the first task, and its mean after the
    others. Those ``OF_LATER_TASKS`` are means over all tasks but the first; ``loss`` and ``trained`` are the training
    loss and accuracy of a task's last epoch, and ``trained_last`` is the training accuracy of the last task's.
    """
    first, *others = after_each_task(run, "accuracy")
    # from the average, which has more digits than the accuracies
    later = ((len(others) + 1) * run["average"] - first) / len(others) if others else float("nan")
    trained = after_each_task(run, "trained")
    values = (run["average"], first, later, run["newest"], run["forgetting"], _number(run, "train_flops"))
    values += (run["images_trained"], trained[-1] if len(trained) > 1 else float("nan"))
    of_later_tasks = {name: _number(run, column) for name, column in OF_LATER_TASKS.items()}
    return dict(zip(MEASURES, values, strict=True)) | of_later_tasks


def _number(run: Mapping[str, Any], column: str) -> float:
    value = run.get(column)
    return float("nan") if value is None else value


def first_tasks_apart(table: pd.DataFrame) -> float:
    """The largest difference in accuracy after the first task between runs of a seed that train it in the same way."""
    same = table.loc[~table["row"].str.contains("^joint|^bic|^foster|tasks=|equal operations")]
    firsts = same.groupby("seed")["first"]
    return float((firsts.max() - firsts.min()).max()) if len(same) else 0.0


class Correlation(NamedTuple):
    """Kendall's tau, its 95 % interval, the probability without correlation, and the number of seeds."""

    tau: float
    low: float
    high: float
    chance: float
    seeds: int


def correlation(wide: pd.DataFrame, methods: Sequence[str], share: int) -> Correlation | None:
    """The correlation of our averages of the methods and the paper's, over the seeds that have all methods.

    The interval is that of the bootstrap over seeds, of all resamples. None with fewer than two seeds.
    """
    columns = cells(methods, share)
    ours = wide.reindex(columns=columns).dropna()
    count = len(ours)
    if count < 2:
        return None
    paper = papers_table("accuracy")[columns].iloc[0]
    taus, weights = [], []
    for chosen in combinations_with_replacement(range(count), count):
        taus.append(_tau(ours.iloc[list(chosen)].mean(), paper)[0])
        weights.append(factorial(count) // prod(map(factorial, Counter(chosen).values())))
    low, high = np.quantile(np.repeat(taus, weights), [0.025, 0.975])
    tau, chance = _tau(ours.mean(), paper)
    return Correlation(tau, float(low), float(high), chance, count)


def _tau(ours: pd.Series, paper: pd.Series) -> tuple[float, float]:
    tau, chance = np.asarray(kendalltau(ours.to_numpy(), paper.to_numpy()))
    return float(tau), float(chance)
