"""Hyperparameters: trials that were tested on held-out training data, and the configuration of each method's best."""

import re
import statistics
from pathlib import Path

import pandas as pd

from pycil_wsc.errors import one_line
from pycil_wsc.files import write_json
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import AVERAGE, Column, measured
from pycil_wsc.report.tables.table import Table, aggregate
from pycil_wsc.report.texts import texts

COLUMNS = (Column("best trial"), Column("median of the trials"), Column("worst trial"))


def trials(group: Group) -> dict[str, tuple[pd.DataFrame, int]]:
    """``{method: (the rows of its trials, best first; number of trials left out)}``.

    ``keys`` distinguishes a trial from the method's others, ``mean`` is its accuracy. The trials of a method are
    compared over the same memory sizes and seeds, those of one of the trials: the ones for which most runs count. Of
    equals, the largest set is chosen, then the one with the smallest numbers. Trials that lack some are left out.
    """
    rows = group.named(group.rows, "keys", "learner", brief=False)
    rows["value"] = measured(rows, AVERAGE)
    by_method = {}
    for method, tried in rows.groupby("learner", sort=False):
        tried = tried.assign(keys=tried["keys"].str.removeprefix(str(method)).str.strip())
        of_trial = tried.groupby("keys", sort=False)[["memory", "seed"]]
        runs = {keys: set(trial.itertuples(index=False, name=None)) for keys, trial in of_trial}
        counts = {}  # of each trial's memory sizes and seeds: how many trials have all of them
        for places in runs.values():
            counts[tuple(sorted(places))] = len([other for other in runs.values() if places <= other])
        chosen = min(counts, key=lambda places: (-len(places) * counts[places], -len(places), places))
        lines = tried[["keys", "memory", "seed"]].itertuples(index=False)
        tried = tried.loc[[(memory, seed) in chosen and runs[keys] >= set(chosen) for keys, memory, seed in lines]]
        tried = tried.assign(value=tried.groupby(["keys", "seed"])["value"].transform("mean"))  # over the memory sizes
        means = tried.drop_duplicates(["keys", "seed"]).groupby("keys")["value"].mean()
        tried = tried.assign(mean=tried["keys"].map(means))
        by_method[str(method)] = tried.sort_values("mean", ascending=False, kind="stable"), len(runs) - counts[chosen]
    return by_method


def tuning(group: Group) -> Table:
    """The table of a group of trials: a row per method."""
    by_method = trials(group)
    parts = []
    counts = {}
    for method, (rows, _) in by_method.items():
        means = rows.drop_duplicates("keys")["mean"]
        counts[method] = len(means)
        best = rows.loc[rows["keys"] == rows["keys"].iloc[0]].assign(column=COLUMNS[0].label, memory=0)
        best = best.drop_duplicates("seed")
        others = best.iloc[[0, 0]].assign(seed=None, memory=0, value=[statistics.median(means), means.min()])
        others["column"] = [column.label for column in COLUMNS[1:]]
        lines = pd.concat([best, others]).rename(columns={"learner": "method"}).assign(trials=len(means))
        parts.append(lines.assign(**{"best trial": best["keys"].iloc[0] or "the only one"}))
    labels = ["method", "trials", "best trial"]
    cells = aggregate(pd.concat(parts), [*labels, "expands"], COLUMNS)
    files = [_file(method, group) for method in by_method]
    part = [name for name, _ in group.setting.part]
    below = texts("tuning", f"{100 * group.setting.validation_split:g}", files, counts, part)
    lacking = {method: left_out for method, (_, left_out) in by_method.items() if left_out}
    title = "Hyperparameters by accuracy on held-out training data (CNN, top-1 %)"
    return Table(group, "tuning", title, labels, COLUMNS, cells, [*below, *texts("missing_trials", lacking)])


def write_winners(group: Group, out: Path) -> None:
    """Write the configuration of each method's best trial, to be tested on the test set.

    Keys that do not affect the result, such as paths, are left out. A file of an earlier report in which no other
    setting was tuned had another name; it is removed.
    """
    for method, (rows, _) in trials(group).items():
        chosen = rows["record"].iloc[0].decisive()
        chosen.pop("validation_split")
        write_json(out / _file(method, group), {"prefix": "tuned"} | chosen)
        if not group.only_tuning:
            (out / _file(method)).unlink(missing_ok=True)


def _file(method: str, group: Group | None = None) -> str:
    name = re.sub(r"[^\w.+-]", "-", one_line(method), flags=re.ASCII)
    return f"tuned_{name}.json" if group is None or group.only_tuning else f"tuned_{name}-{group.slug}.json"
