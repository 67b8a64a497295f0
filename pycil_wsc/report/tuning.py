"""Hyperparameter choice on held-out training data: each method's best trial and its configuration."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pycil_wsc.files import write_json
from pycil_wsc.report.groups import Group
from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import expands
from pycil_wsc.report.rows import Column
from pycil_wsc.report.tables import Table, aggregate
from pycil_wsc.results import Record

COLUMNS = (Column("best trial"), Column("median of the trials"), Column("worst trial"))


class Trial(NamedTuple):
    """The runs of one choice of hyperparameters; ``keys`` distinguishes it from the method's other trials."""

    keys: str
    records: list[Record]
    mean: float


def trials(group: Group) -> dict[str, tuple[list[Trial], int]]:
    """``{method: (trials, best first; number of trials left out)}``.

    The trials of a method are over the same memory sizes and seeds; others are left out. Of several sets of these, the
    largest is chosen; of equally large ones, that of the most trials, and then the one with the smallest numbers.
    """
    members: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record, name in group.names(group.records, lambda record: record.method, brief=False).items():
        members[record.method][name.removeprefix(record.method).strip()].append(record)
    found = {}
    for method, choices in members.items():
        runs = {keys: tuple(sorted((r.memory, r.seed) for r in records)) for keys, records in choices.items()}
        counts = Counter(runs.values())
        chosen = min(counts, key=lambda each: (-len(each), -counts[each], each))
        complete = []
        for keys, records in choices.items():
            if runs[keys] == chosen:
                complete.append(Trial(keys, records, statistics.fmean(record.average for record in records)))
        found[method] = sorted(complete, key=lambda trial: -trial.mean), len(choices) - len(complete)
    return found


def tuning(group: Group) -> Table:
    """The table of a group that was tested on held-out training data: a row per method."""
    found, lines = trials(group), []
    for method, (ranked, _) in found.items():
        row = {"method": method, "trials": len(ranked), "best trial": ranked[0].keys or "the only one"}
        row |= {"expands": expands(method), "memory": 0}
        for record in ranked[0].records:
            lines.append(row | {"column": "best trial", "seed": record.seed, "value": record.average})
            lines[-1]["memory"] = record.memory
        means = [trial.mean for trial in ranked]
        lines.append(row | {"column": "median of the trials", "seed": None, "value": statistics.median(means)})
        lines.append(row | {"column": "worst trial", "seed": None, "value": means[-1]})
    labels = ["method", "trials", "best trial"]
    cells = aggregate(pd.DataFrame(lines), [*labels, "expands"], COLUMNS)
    counts = {method: len(ranked) for method, (ranked, _) in found.items()}
    notes = [
        f"Accuracy on {100 * group.setting.validation_split:g} % of each class's training samples, on which no run "
        "with the same seed was trained. The test set was not used: these numbers select hyperparameters and are not "
        "results.",
        "Configurations of the best trials, for other memory sizes and data sets: "
        f"{', '.join(_file(method, group) for method in found)}.",
    ]
    if len(set(counts.values())) > 1:
        notes.append(
            "The methods have different numbers of trials, so the comparison is not fair: "
            f"{', '.join(f'{method} {count}' for method, count in counts.items())}."
        )
    lacking = [f"{count} of {method}" for method, (_, count) in found.items() if count]
    missing = [f"Missing: runs of some trials, which were left out: {', '.join(lacking)}."] if lacking else []
    title = "Hyperparameters by accuracy on held-out training data (CNN, top-1 %)"
    return Table(group, "tuning", title, labels, COLUMNS, cells, notes, missing)


def write_winners(group: Group, out: Path) -> None:
    """Write the configuration of each method's best trial, to be tested on the test set.

    Keys that do not affect the result, such as paths, are left out. A file of an earlier report in which no other
    setting was tuned had another name; it is removed.
    """
    for method, (ranked, _) in trials(group).items():
        chosen = ranked[0].records[0].decisive()
        chosen.pop("validation_split")
        write_json(out / _file(method, group), {"prefix": "tuned"} | chosen)
        if not group.only_tuning:
            obsolete = out / _file(method)
            if obsolete.is_file():
                obsolete.unlink()


def _file(method: str, group: Group | None = None) -> str:
    name = re.sub(r"[^\w.+-]", "-", clean(method), flags=re.ASCII)
    return f"tuned_{name}.json" if group is None or group.only_tuning else f"tuned_{name}-{group.slug}.json"
