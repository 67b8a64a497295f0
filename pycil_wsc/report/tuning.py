"""Hyper-parameters chosen on held-out training data: each method's best trial, and its configuration for other settings."""

import re
import statistics
from collections import defaultdict
from typing import NamedTuple

from pycil_wsc.config.options import INCIDENTAL
from pycil_wsc.report.groups import label
from pycil_wsc.report.paper import expands
from pycil_wsc.report.tables import Cell, Column, Row, Table

COLUMNS = (Column("best trial"), Column("median of the trials"), Column("worst trial"))


class Trial(NamedTuple):
    """The runs of one choice of hyper-parameters; ``keys`` names it among the method's others."""

    keys: str
    records: tuple

    @property
    def scores(self):
        return tuple(record.data["avg_acc"] for record in self.records)

    @property
    def mean(self):
        return statistics.fmean(self.scores)


def trials(group):
    """``{method: (its trials, the best first; how many were left out)}``: those that lack a memory size or seed of the others are."""
    members = defaultdict(lambda: defaultdict(list))
    for record, name in label(group.records, lambda record: record.method).items():
        members[record.method][name.removeprefix(record.method).strip()].append(record)
    found = {}
    for method, choices in members.items():
        most = max(map(len, choices.values()))
        whole = [Trial(keys, tuple(records)) for keys, records in choices.items() if len(records) == most]
        found[method] = sorted(whole, key=lambda trial: -trial.mean), len(choices) - len(whole)
    return found


def tuning(group):
    """The table of a group tested on held-out training data: a row per method."""
    found, rows = trials(group), []
    for method, (ranked, _) in found.items():
        means = [trial.mean for trial in ranked]
        cells = (Cell(ranked[0].scores), Cell((statistics.median(means),)), Cell((means[-1],)))
        rows.append(Row((method, len(ranked), ranked[0].keys or "the only one"), expands(method), cells))
    share, counts = group.setting.validation_split, {method: len(ranked) for method, (ranked, _) in found.items()}
    notes = [
        f"Accuracy on {100 * share:g} % of each class's training samples, which no run of its seed was trained on; the test set was not looked at. A reason to choose, not a result."
    ]
    notes += [
        f"The winners' configurations, for other memory sizes and data sets: {', '.join(_file(method, group) for method in found)}."
    ]
    if len(set(counts.values())) > 1:
        notes.append(
            f"Not the same number of trials, so not the same chance: {', '.join(f'{method} {count}' for method, count in counts.items())}."
        )
    lacking = [f"{count} of {method}" for method, (_, count) in found.items() if count]
    missing = (f"Missing: runs of some trials, which were left out: {', '.join(lacking)}.",) if lacking else ()
    return Table(
        f"tuning-{group.slug}",
        "Hyper-parameters by accuracy on held-out training data (CNN, top-1 %)",
        group.title,
        ("method", "trials", "best trial"),
        COLUMNS,
        tuple(rows),
        tuple(notes),
        missing,
    )


def winners(group):
    """``{file name: configuration}`` of each method's best trial: without where it ran, and tested on the test set again."""
    configs = {}
    for method, (ranked, _) in trials(group).items():
        config = ranked[0].records[0].config
        configs[_file(method, group)] = {"prefix": "tuned"} | {
            name: value for name, value in config.items() if name not in INCIDENTAL | {"validation_split"}
        }
    return configs


def _file(method, group):
    name = re.sub(r"[^\w.+-]", "-", method)
    return f"tuned_{name}.json" if group.alone else f"tuned_{name}-{group.slug}.json"
