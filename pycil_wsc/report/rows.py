"""The table of rows, a line per run, of which every table and figure is a view; and the measures that they read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pycil_wsc.report.texts import clean, data_file
from pycil_wsc.results import ALL, Record
from pycil_wsc.results.duplicates import Variant

PAPER = data_file("paper.json")  # the paper's numbers, shown for reference beside ours
SCHEDULES = {method: tuple(epochs) for method, epochs in PAPER["schedules"].items()}  # epochs of first, later tasks
Contents = Mapping[str, Any]  # of a result


class Column(NamedTuple):
    """A column of a table.

    ``place``: where its number is in a result, keys and indices with dots between, or a function of the result. If a
    list is there, its mean counts. ``exact``: a count, the same in every seed. ``signed``: a difference.
    """

    label: str
    place: str | Callable[[Contents], float] = ""
    decimals: int = 2
    scale: float = 1
    exact: bool = False
    signed: bool = False

    def read(self, record: Record) -> float | None:
        """The number in a run's result; None if it lacks the measure, such as a result of an earlier version."""
        found: Any = record.data
        try:
            if callable(self.place):
                return self.place(found)
            for key in self.place.split("."):
                found = found[int(key)] if isinstance(found, list) else found[key]
            return self.scale * sum(found) / len(found) if isinstance(found, list) else self.scale * found
        except (KeyError, TypeError, IndexError, ZeroDivisionError):
            return None


MEASURES: dict[str, list[Column]] = {}
for _kind, _columns in data_file("measures.json").items():
    if _kind != "note":
        MEASURES[_kind] = [Column(**column) for column in _columns]
AVERAGE, TRAINING = MEASURES["accuracy"][0], MEASURES["cost"][0]


def scores(tasks: Sequence[str], version: str = "trace", stage: int | None = None) -> list[Column]:
    """A language model's scores in percent, by one version of the metrics.

    They are those after the last task with their summaries, or those after the task number ``stage``, from 0, with
    their mean (TRACE's overall performance).
    """
    row = "matrix.-1" if stage is None else f"matrix.{stage}"
    places = {f"{row}.{number}": task for number, task in enumerate(tasks)}
    if stage is None:
        places |= {"last_average": "average", "new_score": "new task", "forgetting": "forgetting"}
    else:
        places[row] = "overall"
    columns = [Column(label, f"scores.{version}.{place}", scale=100) for place, label in places.items()]
    learned = len(tasks) if stage is None else stage + 1
    return [*columns, Column("backward transfer", partial(_backward_transfer, version=version, tasks=learned))]


def _backward_transfer(data: Contents, version: str, tasks: int) -> float:
    """The mean over the first ``tasks`` of (last score - score when learned) in percent; 0 for the newest one."""
    matrix = data["scores"][version]["matrix"][:tasks]
    return sum(100 * (last - row[-1]) for last, row in zip(matrix[-1], matrix)) / tasks


def rows_of(records: Iterable[Record], variant_of: Mapping[Record, Variant]) -> pd.DataFrame:
    """The table of rows.

    ``variant``: the values that decide the result, except method, memory size and seed; ``frozen``: the same as a
    hashable. ``changed``: the keys of the paper's studies in which a run differs from the paper's method.
    """
    lines = []
    for record in records:
        line = {"record": record, "learner": record.method, "memory": record.memory, "seed": record.seed}
        line |= {"schedule": (record.config.get("init_epoch"), record.config.get("epochs"))}
        line |= {"expands": expands(record.method), "changed": record.changed}
        line |= {"variant": variant_of[record], "frozen": variant_of[record].frozen, "label": _label_of(record)}
        lines.append(line)
    return pd.DataFrame(lines)


def _label_of(record: Record) -> str | None:
    """The name set by ``label`` in the run's configuration."""
    own = record.config.get("label")
    return clean(own) or None if isinstance(own, str) else None


def measured(rows: pd.DataFrame, column: Column) -> np.ndarray:
    """The measure of each row; NaN where a run lacks it."""
    return np.array([column.read(record) for record in rows["record"]], dtype=float)


def melted(rows: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """A line per row and measure, with the measure's label as its ``column`` and its ``value``."""
    parts = []
    for column in columns:
        parts.append(rows.assign(column=column.label, value=measured(rows, column)))
    return pd.concat(parts) if parts else rows.iloc[:0]


def by_memory(rows: pd.DataFrame, unit: str = "") -> pd.DataFrame:
    """A line per row, whose ``column`` is the size of its memory and whose ``value`` is its average accuracy."""
    sizes = [memory_text(memory) + unit for memory in rows["memory"]]
    return rows.assign(column=sizes, value=measured(rows, AVERAGE))


def memory_text(memory: float) -> str:
    """A number of exemplars in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"


def expands(method: str) -> bool:
    """Whether the method's network grows with the tasks (or doubles)."""
    return method.removesuffix("+wsc") in PAPER["expanding"]
