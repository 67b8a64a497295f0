"""What the runs of a study say about the paper's claims: paired differences over equal seeds, their intervals, and
verdicts. A table of runs has a line per run: its row (the method, and in what it differs from the usual), ``share``,
the fraction of the images that its memory keeps, its seed and its measures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pandas as pd
from over_seeds import LEVEL, detectable, estimate, interval, kept_by_holm  # beside this file
from scipy.stats import ttest_1samp

from pycil_wsc.report.rows import PAPER

SHARES = (4, 8, 16, 20, 40, 60, 80, 100)  # of a class's images that the memory keeps, in percent: the paper's sizes
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


def cells(rows: Iterable[str], share: int) -> list[str]:
    """The columns of the rows at a fraction of memory."""
    return [f"{row}@{share}" for row in rows]


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
    paper = differences(claim, papers_table(claim.study)) if claim.measure == "average" else pd.DataFrame()
    found = Finding(claim, paper, differences(claim, by_seed(table, claim.measure)))
    return replace(found, untested=why_untested(found, table))


# ---- what the runs cannot decide -------------------------------------------------------------------------------------

CONVERGED = 95.0  # training accuracy, in percent, from which on a network counts as trained to the end
LONGER = 1.1  # times as many training images from which on a schedule counts as longer
OF_PLASTICITY = ("newest", "among", "among_last", "loss", "cosine", "gradient", "drift")  # what a network still learns
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


# ---- the rows of a page ----------------------------------------------------------------------------------------------


def by_chance(findings: Sequence[Finding]) -> tuple[int, set[int]]:
    """The number of claims that a difference is above 0, and which of ``findings`` are told from 0 only before Holm's
    correction.
    """
    chances: dict[int, float] = {}
    for place, each in enumerate(findings):
        of_difference = each.claim.accepts == (0, inf) and each.verdict not in (NOT_TESTED, NOT_RUN)
        if of_difference and each.seeds.nunique() > 1:
            chances[place] = float(np.asarray(ttest_1samp(each.seeds, 0))[1])
    told = {place for place, chance in chances.items() if chance <= LEVEL}
    return len(chances), told - kept_by_holm(chances)


def summaries(findings: Sequence[Finding], needed: int) -> list[tuple[str, ...]]:
    """The rows of a table of claims, the header first. A verdict on fewer than ``needed`` seeds has their number."""
    _, lost = by_chance(findings)
    header = ("claim", "memory, %", "verdict", "ours", "the paper", "detectable")
    return [header, *(summary(each, needed, place in lost) for place, each in enumerate(findings))]


def summary(each: Finding, needed: int, by_chance: bool = False) -> tuple[str, ...]:
    """The row of a claim; ``by_chance``: whether its verdict falls by Holm's correction."""
    claim, seeds = each.claim, each.seeds
    verdict = each.verdict
    if each.untested:
        verdict += f": {each.untested}"
    if by_chance:
        verdict += ", not by Holm"
    if len(seeds) == 1:
        verdict = "one seed"
    elif 1 < len(seeds) < needed:
        verdict += f" ({len(seeds)} seeds)"
    least = ""
    if claim.measure != "cost" and len(seeds) > 1:
        least = f"{detectable(len(seeds)) * interval(seeds)[1]:.2f}"
    return _claimed(claim), _sizes(claim), verdict, measured(claim, seeds), _papers(each), least


def _claimed(claim: Claim) -> str:
    """The claim, with the limits of its difference."""
    low, high = claim.accepts
    text = claim.text
    if claim.accepts != (0, inf):
        text += f" (above {low:g})" if high == inf else f" ({low:g} to {high:g})"
    return f"{text} (added)" if claim.added else text


def _sizes(claim: Claim) -> str:
    sizes = f"{claim.shares[0]} to {claim.shares[-1]}" if len(claim.shares) > 3 else ", ".join(map(str, claim.shares))
    return f"{sizes} against {', '.join(map(str, claim.against))}" if claim.against else sizes


def _papers(each: Finding) -> str:
    theirs = each.paper.mean(axis=1, skipna=False)
    return each.claim.stated if theirs.isna().all() else f"{theirs.iloc[0]:+.2f}"


def measured(claim: Claim, seeds: pd.Series) -> str:
    """The mean with the half-width of its interval, if it has one; differences have their sign."""
    return estimate(seeds, sign(claim)) if len(seeds) else ""


def sign(claim: Claim) -> str:
    """The format's sign: that of a difference is always shown."""
    return "+" if claim.minus else ""
