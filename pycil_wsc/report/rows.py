"""The table of results, a row per run, of which every table and figure is a view; and where in a result numbers are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pycil_wsc.errors import one_line
from pycil_wsc.report.duplicates import Variant
from pycil_wsc.report.texts import data_file, method_rank
from pycil_wsc.results import ALL, Record
from pycil_wsc.results.schema import ImageResult, is_measure

PAPER = data_file("paper.json")  # the paper's numbers, shown for reference beside ours
SETTINGS = PAPER["settings"]  # the values of keys that are the same in all of its runs
SCHEDULES = {method: tuple(epochs) for method, epochs in PAPER["schedules"].items()}  # epochs of first, later tasks


class Column(NamedTuple):
    """A column of a table.

    ``place``: where its number is in a result, keys and indices with dots between. If a list is there, its mean counts.
    ``exact``: a count, the same in every seed. ``signed``: a difference.
    """

    label: str
    place: str = ""
    decimals: int = 2
    scale: float = 1
    exact: bool = False
    signed: bool = False

    def read(self, record: Record) -> float | None:
        """The number in a run's result; None if it lacks the measure, such as a result of an earlier version."""
        value: Any = record.data
        try:
            for key in [self.place] if self.place in value else self.place.split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
            return self.scale * sum(value) / len(value) if isinstance(value, list) else self.scale * value
        except (KeyError, TypeError, IndexError, ZeroDivisionError):
            return None


MEASURES: dict[str, list[Column]] = {}
for _kind, _columns in data_file("measures.json").items():
    MEASURES[_kind] = [Column(**column) for column in _columns]
AVERAGE = MEASURES["accuracy"][0]
TRAINING = MEASURES["cost"][0]


def undeclared(records: Iterable[Record]) -> list[Column]:
    """Columns for what image runs recorded beside the declared fields: registered metrics, and records of a method.

    A field is a measure if it is a number in every run that has it, or a list of numbers.
    """
    names: dict[str, bool] = {}
    for record in records:
        for name in record.data.keys() - ImageResult.model_fields.keys() - {"schema"}:
            names[name] = names.get(name, True) and is_measure(record.data[name])
    return [Column(name, name) for name in sorted(names) if name and names[name]]


def scores(tasks: Sequence[str], version: str = "trace", stage: int = -1) -> list[Column]:
    """A language model's scores in percent, by one version of the metrics.

    They are those after the task number ``stage``, from 0, with their mean (TRACE's overall performance), or those
    after the last task with their summaries.
    """
    if stage < 0:
        summaries = {"last_average": "average", "new_score": "new task", "forgetting": "forgetting"}
    else:
        summaries = {f"matrix.{stage}": "overall"}
    summaries[f"bwt.{stage}"] = "backward transfer"
    taken = {*summaries.values(), *(column.label for column in MEASURES["use"])}  # by other columns of the same table
    places: dict[str, str] = {}
    for number, task in enumerate(tasks):
        label = task
        while label in taken:
            label += " (task)"
        taken.add(label)
        places[f"matrix.{stage}.{number}"] = label
    places |= summaries
    return [Column(label, f"scores.{version}.{place}", scale=100) for place, label in places.items()]


def rows_of(variants: Mapping[Record, Variant]) -> pd.DataFrame:
    """The table of rows, by method, memory size and seed.

    ``variant``: the values that decide the result, except method, memory size and seed; ``frozen``: the same as a
    hashable. ``changed``: the keys of the paper's studies in which a run differs from the paper's method; ``others``:
    those of its ``SETTINGS``. ``label``: the name that is set in its configuration, or None.
    """
    lines = []
    for record in sorted(variants, key=lambda record: (method_rank(record.method), record.memory, record.seed)):
        label = record.config.get("label") or None
        line = {"record": record, "learner": record.method, "memory": record.memory, "seed": record.seed}
        line |= {"variant": variants[record], "frozen": variants[record].frozen, "changed": record.changed}
        line["others"] = {name for name, usual in SETTINGS.items() if record.config.get(name) not in (None, usual)}
        line |= {"schedule": (record.config.get("init_epoch"), record.config.get("epochs"))}
        line |= {"expands": record.expands, "label": one_line(label) if isinstance(label, str) else None}
        lines.append(line)
    return pd.DataFrame(lines)


def measured(rows: pd.DataFrame, column: Column) -> np.ndarray:
    """The measure of each row; NaN where a run lacks it."""
    return np.array([column.read(record) for record in rows["record"]], dtype=float)


def melted(rows: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """A row per run and measure, with the measure's label as its ``column`` and its ``value``."""
    parts = [rows.assign(column=column.label, value=measured(rows, column)) for column in columns]
    return pd.concat(parts) if parts else rows.iloc[:0]


def by_memory(rows: pd.DataFrame, unit: str = "") -> pd.DataFrame:
    """A row per run, whose ``column`` is the size of its memory and whose ``value`` is its average accuracy."""
    sizes = [memory_text(memory) + unit for memory in rows["memory"]]
    return rows.assign(column=sizes, value=measured(rows, AVERAGE))


def memory_text(memory: float) -> str:
    """A number of exemplars in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"
