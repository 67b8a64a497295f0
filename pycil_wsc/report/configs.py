"""The configurations that a report offers: of all runs of a group, and of each method's best trial.

Hyperparameters are chosen by trials that were tested on held-out training data.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pycil_wsc.files import write_json
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import AVERAGE, Column, measured
from pycil_wsc.report.tables import Table, aggregate
from pycil_wsc.report.texts import clean, texts

COLUMNS = (Column("best trial"), Column("median of the trials"), Column("worst trial"))
Settings = dict[str, object]


def experiment(group: Group) -> Settings:
    """The keys shared by all runs and, under ``runs``, one entry per method variant with its other keys and seeds."""
    memory = "memory_per_class" if group.setting.fixed_memory else "memory_size"
    settings: list[Settings] = []
    for record in group.records:
        settings.append({name: value for name, value in record.decisive().items() if name not in (memory, "seed")})
    alike, _ = pd.factorize(pd.Series([json.dumps(own, sort_keys=True) for own in settings]))
    sizes = [record.config[memory] for record in group.records]
    runs = pd.DataFrame({"alike": alike, "size": sizes, "seed": group.rows["seed"]})
    first = runs.drop_duplicates("alike").index
    seeds_of = runs.groupby(["alike", "size"])["seed"].agg(tuple).reset_index()
    sizes_of = seeds_of.groupby(["alike", "seed"], sort=False)["size"].agg(list).reset_index()
    entries: list[Settings] = []
    for number, seeds, own_sizes in sizes_of.itertuples(index=False, name=None):
        entries.append(settings[first[number]] | {memory: _axis(own_sizes), "seed": _axis(seeds)})
    shared = dict(entries[0])
    for name in entries[0]:
        values = {json.dumps(entry[name]) if name in entry else None for entry in entries}
        if len(values) > 1 or name in ("model_name", memory, "seed"):
            del shared[name]
    runs = [{name: value for name, value in entry.items() if name not in shared} for entry in entries]
    return {"prefix": "again", **shared, "runs": runs}


def _axis(values: Sequence[int]) -> object:
    return values[0] if len(values) == 1 else list(values)


# ---- hyperparameters -------------------------------------------------------------------------------------------------


def trials(group: Group) -> dict[str, tuple[pd.DataFrame, int]]:
    """``{method: (the rows of its trials, best first; number of trials left out)}``.

    ``keys`` distinguishes a trial from the method's others, ``mean`` is its accuracy. The trials of a method are over
    the same memory sizes and seeds; others are left out. Of several sets of these, the largest is chosen; of equally
    large ones, that of the most trials, and then the one with the smallest numbers.
    """
    rows = group.named(group.rows, "keys", "learner", brief=False)
    rows["value"] = measured(rows, AVERAGE)
    found = {}
    for method, own in rows.groupby("learner", sort=False):
        own = own.assign(keys=own["keys"].str.removeprefix(str(method)).str.strip())
        runs = {}
        for keys, trial in own.groupby("keys", sort=False):
            runs[keys] = tuple(sorted(zip(trial["memory"], trial["seed"])))
        counts = Counter(runs.values())
        chosen = min(counts, key=lambda each: (-len(each), -counts[each], each))
        own = own.loc[[runs[keys] == chosen for keys in own["keys"]]]
        own = own.assign(mean=own.groupby("keys")["value"].transform(statistics.fmean))
        found[str(method)] = own.sort_values("mean", ascending=False, kind="stable"), len(runs) - counts[chosen]
    return found


def tuning(group: Group) -> Table:
    """The table of a group of trials: a row per method."""
    found, parts, counts = trials(group), [], {}
    for method, (rows, _) in found.items():
        means = rows.drop_duplicates("keys")["mean"]
        counts[method] = len(means)
        best = rows.loc[rows["keys"] == rows["keys"].iloc[0]].assign(column=COLUMNS[0].label)
        others = best.iloc[[0, 0]].assign(seed=None, memory=0, value=[statistics.median(means), means.min()])
        others["column"] = [column.label for column in COLUMNS[1:]]
        lines = pd.concat([best, others]).rename(columns={"learner": "method"}).assign(trials=len(means))
        parts.append(lines.assign(**{"best trial": best["keys"].iloc[0] or "the only one"}))
    labels = ["method", "trials", "best trial"]
    cells = aggregate(pd.concat(parts), [*labels, "expands"], COLUMNS)
    percent = f"{100 * group.setting.validation_split:g}"
    below = texts("tuning", percent, [_file(method, group) for method in found], counts)
    lacking = {method: left_out for method, (_, left_out) in found.items() if left_out}
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
    name = re.sub(r"[^\w.+-]", "-", clean(method), flags=re.ASCII)
    return f"tuned_{name}.json" if group is None or group.only_tuning else f"tuned_{name}-{group.slug}.json"
