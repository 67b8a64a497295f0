"""What the runs of exps/studies/night say about a claim of the paper: a table of runs, paired differences, and their
intervals.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import factorial, inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import kendalltau, nct, ttest_1samp

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "scripts")]

from pycil_wsc.report.rows import PAPER  # noqa: E402
from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.results.identity import STUDIED  # noqa: E402
from pycil_wsc.results.run_table import Row, read  # noqa: E402

RUNS = ROOT / "results" / "studies" / "night" / "table.csv"
SEEDS = 5
IMAGES = 25  # of each class
CLASSES = 50
SHARES = (4, 8, 16, 20, 40, 60, 80, 100)  # of a class's images that the memory keeps, in percent
THREE = (4, 40, 100)  # those of the studies of WSC
DISTILLING, EXPANDING = ("icarl", "bic", "wa"), ("der", "foster", "memo")
OTHERS = (*DISTILLING, *EXPANDING)
EIGHT = ("replay", "wsc", *OTHERS)
Group = Sequence[str]  # rows whose mean, or whose best, counts


@dataclass(frozen=True)
class Claim:
    """The mean over ``shares`` of a difference: the sum of the means of the groups ``plus`` less that of ``minus``.

    Args:
        text: what is claimed, in a few words.
        accepts: the values between which the difference is, if the claim is true.
        against: the fractions of memory of ``minus``; None: those of ``plus``.
        best: each group stands for its best row at each share, by the mean over the seeds, instead of its mean.
        measure: the column of the table of runs.
        study: the paper's table; its main table has what this one lacks.
        stated: the paper's number, of claims without a table.
        added: it was added to the list when some of its runs had been seen.
    """

    text: str
    plus: Sequence[Group]
    minus: Sequence[Group]
    shares: Sequence[int] = SHARES
    accepts: tuple[float, float] = (0, inf)
    against: Sequence[int] | None = None
    best: bool = False
    measure: str = "average"
    study: str = "accuracy"
    stated: str = "figure"
    added: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        """The fractions of memory of ``plus`` and of ``minus`` that are compared."""
        return list(zip(self.shares, self.against or self.shares, strict=True))

    def cells(self) -> list[str]:
        """All cells that the claim is about: rows at a fraction of memory, as ``wsc@40``."""
        found = []
        for ours, theirs in self.pairs():
            for group in self.plus:
                found += cells(group, ours)
            for group in self.minus:
                found += cells(group, theirs)
        return list(dict.fromkeys(found))


def in_setting(rows: Group, setting: str) -> Group:
    """The rows of the same methods in another setting."""
    return tuple(f"{row} {setting}" for row in rows)


def cells(rows: Iterable[str], share: int) -> list[str]:
    """The columns of the rows at a fraction of memory."""
    return [f"{row}@{share}" for row in rows]


# ---- the table of runs -----------------------------------------------------------------------------------------------


def recorded(file: Path) -> list[Row]:
    """The runs in the table of the small protocol; none if it does not exist."""
    return read(file) if file.exists() else []


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


def after_each_task(run: Row, measure: str) -> list[float]:
    """A measure of :data:`~pycil_wsc.results.run_table.BY_TASK` after each task; empty if the run lacks it."""
    values = []
    while (value := run.get(f"{measure}_{len(values) + 1}")) is not None:
        values.append(value)
    return values


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


def by_seed(table: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A line per seed with a column for each cell. ``cost`` is in multiples of Replay's with the same memory."""
    if measure == "cost":
        replay = table.loc[table["row"].eq("replay"), ["seed", "share", "flops"]]
        both = table.merge(replay, on=["seed", "share"], how="left", suffixes=("", "_of_replay"))
        table = both.assign(cost=both["flops"] / both["flops_of_replay"])
    return table.assign(cell=table["row"] + "@" + table["share"].astype(str)).pivot(
        index="seed", columns="cell", values=measure
    )


SAME_ROW = dict.fromkeys(("moment", "blend", "once"), "wsc") | {"wsc without reset": "wsc reset=none"}
SAME_ROW |= dict.fromkeys(("wsc without averaging", "blend without averaging"), "wsc average=False")
ROWS = {
    "importance": "wsc importance={}",
    "reset-rule": "wsc reset={}",
    "reset-frequency": "wsc reset_every={}",
    "reservoir": "{} exemplars=reservoir",
    "twenty": "{} tasks=20",
}


def papers_table(study: str) -> pd.DataFrame:
    """The paper's averages as :func:`by_seed` has ours, in one line: of a study, and of the main table for the rest."""
    tables = PAPER["tables"]["cifar100-b10-inc10"] | {"twenty": PAPER["tables"]["cifar100-b5-inc5"]["accuracy"]}
    values = {}
    for each in ("accuracy", study):
        for row, by_memory in tables[each].items():
            name = SAME_ROW.get(row) or ROWS.get(each, "{}").format(row)
            for memory, value in by_memory.items():
                values[f"{name}@{int(memory) // 5}"] = value["mean"]
    return pd.DataFrame([values])


# ---- what it says ----------------------------------------------------------------------------------------------------

NOT_RUN, NOT_TESTED = "not run yet", "not tested here"
VERDICTS = ("the opposite", "not seen", "seen", NOT_TESTED, NOT_RUN)  # unflattering ones first


@dataclass(frozen=True)
class Finding:
    """A claim, the difference in the paper, and ours: a line per seed and a column per fraction of memory.

    ``untested`` says why the runs cannot decide the claim; it is empty if they can.
    """

    claim: Claim
    paper: pd.DataFrame
    ours: pd.DataFrame
    runs: int  # that there are
    all_runs: int
    untested: str = ""

    @property
    def seeds(self) -> pd.Series:
        """The mean over the shares, for each seed that has all runs."""
        return self.ours.mean(axis=1, skipna=False).dropna()

    @property
    def verdict(self) -> str:
        """Whether the interval lies inside the values that the claim accepts, outside, or across."""
        if len(self.seeds) < 2:
            return NOT_RUN
        return NOT_TESTED if self.untested else self.outcome

    @property
    def outcome(self) -> str:
        """The same, whether or not the runs can decide the claim."""
        mean, half = interval(self.seeds)
        low, high = self.claim.accepts
        if low < mean - half and mean + half < high:
            return "seen"
        return "the opposite" if mean + half < low or mean - half > high else "not seen"


def interval(seeds: pd.Series) -> tuple[float, float]:
    """The mean over seeds, and the half-width of its 95 % interval by Student's t."""
    return float(seeds.mean()), float(reach(len(seeds) - 1) * seeds.sem())


@functools.cache
def detectable(count: int) -> float:
    """The true difference that a test of ``count`` pairs at 5 % detects with a probability of 0.8, in half-widths."""
    limit = reach(count - 1)
    found: Any = brentq(lambda difference: nct.sf(limit, count - 1, difference * limit) - 0.8, 0.5, 3)
    return float(found)


def differences(claim: Claim, wide: pd.DataFrame) -> pd.DataFrame:
    """The claim's difference at each fraction of memory (columns), for each seed (index); NaN for missing runs."""
    found = {}
    for ours, theirs in claim.pairs():
        plus = sum(_of_group(wide, group, ours, claim.best) for group in claim.plus)
        found[ours] = plus - sum(_of_group(wide, group, theirs, claim.best) for group in claim.minus)
    return pd.DataFrame(found)


def _of_group(wide: pd.DataFrame, group: Group, share: int, best: bool) -> pd.Series:
    own = wide.reindex(columns=cells(group, share))
    complete = own.dropna()
    if best and len(complete):
        return complete[complete.mean().idxmax()].reindex(own.index)
    return own.mean(axis=1, skipna=False)


def finding(claim: Claim, table: pd.DataFrame) -> Finding:
    """What the table of runs says about a claim."""
    wide = by_seed(table, claim.measure)
    runs = int(wide.reindex(columns=claim.cells()).count().sum())
    paper = differences(claim, papers_table(claim.study)) if claim.measure == "average" else pd.DataFrame()
    found = Finding(claim, paper, differences(claim, wide), runs, SEEDS * len(claim.cells()))
    return replace(found, untested=why_untested(found, table))


# ---- what the runs cannot decide -------------------------------------------------------------------------------------

CONVERGED = 95.0  # training accuracy, in percent, from which on a network counts as trained to the end
LONGER = 1.1  # times as many training images from which on a schedule counts as longer
OF_PLASTICITY = ("newest", "loss", "cosine", "gradient", "drift")  # what a network still learns, and how it moves
UNCONVERGED, LONGER_SCHEDULE, NO_EFFECT, OTHER_CLASSES = "training", "schedule", "reset", "classes"
RESET_GAIN = Claim("WSC is ahead of averaging alone", [("wsc",)], [("wsc reset=none",)], study="ablation")


def why_untested(found: Finding, table: pd.DataFrame) -> str:
    """Why the runs cannot decide a claim, or an empty string if they can.

    * ``classes``: the runs that it compares learn different numbers of classes.
    * ``training``: it is about plasticity or full retraining, and the networks are not trained to the end.
    * ``schedule``: the side that is ahead trains longer, and the other one is not trained to the end.
    * ``reset``: it asks how to reset, its difference is not told from 0, and neither is that of the reset itself.
    """
    claim, seeds = found.claim, found.seeds
    if len(seeds) < 2 or not claim.minus or "trained" not in table:
        return ""
    plus, minus = (_runs_of(table, claim, side) for side in ("plus", "minus"))
    both = pd.concat([plus, minus])
    if both["classes"].nunique() > 1:
        return OTHER_CLASSES
    if (claim.measure in OF_PLASTICITY or both["row"].str.startswith("joint").any()) and _least(both) < CONVERGED:
        return UNCONVERGED
    ahead, behind = (plus, minus) if seeds.mean() > 0 else (minus, plus)
    longer = ahead["images"].mean() > LONGER * behind["images"].mean()
    if claim.measure == "average" and longer and _least(behind) < CONVERGED:
        return LONGER_SCHEDULE
    if of_resets(claim) and not told_from_0(seeds):
        gain = differences(RESET_GAIN, by_seed(table, "average")).mean(axis=1, skipna=False).dropna()
        return "" if len(gain) > 1 and told_from_0(gain) else NO_EFFECT
    return ""


def _runs_of(table: pd.DataFrame, claim: Claim, side: str) -> pd.DataFrame:
    """The runs of one side of a claim."""
    shares = claim.shares if side == "plus" else claim.against or claim.shares
    rows = [row for group in getattr(claim, side) for row in group]
    return table.loc[table["row"].isin(rows) & table["share"].isin(shares)]


def _least(runs: pd.DataFrame) -> float:
    """The training accuracy of the rows, means over seeds, that is the lowest; NaN if none has one."""
    trained = runs.groupby(["row", "share"]).agg({"trained": "mean"}).to_numpy(float).ravel()
    known = trained[~np.isnan(trained)]
    return float(known.min()) if len(known) else float("nan")


def of_resets(claim: Claim) -> bool:
    """Whether it compares ways to reset: all its rows are WSC's with a reset."""
    rows = [row for group in (*claim.plus, *claim.minus) for row in group]
    return all(row.split()[0] == "wsc" and "reset=none" not in row for row in rows)


def told_from_0(seeds: pd.Series) -> bool:
    """Whether the interval of the mean over seeds excludes 0."""
    mean, half = interval(seeds)
    return abs(mean) > half


def by_chance(findings: Sequence[Finding]) -> tuple[int, list[str]]:
    """The number of claims that a difference is above 0, and those told from 0 that by Holm's correction are not."""
    chances = {}
    for each in findings:
        if each.verdict not in (NOT_TESTED, NOT_RUN) and each.seeds.nunique() > 1:
            chances[each.claim.text] = float(np.asarray(ttest_1samp(each.seeds, 0))[1])
    lost, count, kept = [], len(chances), True
    for rank, (text, chance) in enumerate(sorted(chances.items(), key=lambda pair: pair[1])):
        kept = kept and chance <= 0.05 / (count - rank)
        if not kept and chance <= 0.05:
            lost.append(text)
    return count, lost


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
