"""The table of rows: a line per run with its method, memory, seed and every measure. All tables are views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from pycil_wsc.report.paper import expands
from pycil_wsc.results import ALL, Record

Contents = Mapping[str, Any]  # of a result


class Column(NamedTuple):
    """A column of a table.

    ``place``: where its number is in a result, keys and indices with dots between, or a function of the result. If a
    list is there, its mean counts.
    """

    label: str
    place: str | Callable[[Contents], float] = ""
    decimals: int = 2
    scale: float = 1
    exact: bool = False  # a count: the same in every seed
    signed: bool = False  # a difference


MIB = 2**-20
ACCURACIES = [
    Column("average", "avg_acc"),
    Column("last", "last_acc"),
    Column("newest task", "new_acc"),
    Column("forgetting", "forgetting"),
    Column("last, top-5", "top5_curve.-1"),
    Column("task known", "task_known_curve"),
    Column("NME average", "nme_curve"),
]
TRAINING = Column("training, s", "train_seconds", 0)
SPENT = Column("training in this run, s", "train_seconds_spent", 0)
COSTS = [
    TRAINING,
    SPENT,
    Column("total, s", "total_seconds", 0),
    Column("training images", "images_trained", 0, exact=True),
    Column("peak memory, MiB", "peak_memory_bytes", 0, MIB),
    Column("parameters", "parameters", 0, exact=True),
]
SCORING = [
    Column("scoring, s", "importance_seconds"),
    Column("scoring, MiB", "importance_bytes", scale=MIB),
    Column("scoring, passes", "importance_passes"),
]
USE = [Column("minutes", "train_minutes", 1), Column("relative VRAM", "relative_vram_minutes", 1)]
LANGUAGE_COSTS = [
    Column("models resident", "models_resident", exact=True),
    Column("streamed", "models_resident_streamed", exact=True),
    Column("relative VRAM, streamed", "relative_vram_minutes_streamed", 1),
    Column("peak memory (MiB)", "peak_memory_bytes", 0, MIB),
    Column("tokens trained", "tokens_trained", 0, exact=True),
    Column("tokens per second", "tokens_per_second", 0),
    Column("padding (%)", "padding", 1, 100),
]


def scores(tasks: Sequence[str], version: str) -> list[Column]:
    """A language model's scores after the last task, in percent, by one version of the metrics."""
    summaries = {"last_average": "average", "new_score": "new task", "forgetting": "forgetting"}
    places = {f"matrix.-1.{place}": task for place, task in enumerate(tasks)} | summaries
    columns = [Column(label, f"scores.{version}.{place}", scale=100) for place, label in places.items()]
    return [*columns, _transfer(len(tasks), version)]


def scores_after(tasks: Sequence[str], stage: int) -> list[Column]:
    """A language model's scores after the task number ``stage``, from 0, with their mean (TRACE's overall)."""
    places = {f"matrix.{stage}.{place}": task for place, task in enumerate(tasks)} | {f"matrix.{stage}": "overall"}
    columns = [Column(label, f"scores.trace.{place}", scale=100) for place, label in places.items()]
    return [*columns, _transfer(stage + 1, "trace")]


def _transfer(tasks: int, version: str) -> Column:
    """The mean over the first ``tasks`` of (last score - score when learned) in percent; 0 for the newest one."""

    def read(data: Contents) -> float:
        matrix = data["scores"][version]["matrix"][:tasks]
        return sum(100 * (last - row[-1]) for last, row in zip(matrix[-1], matrix)) / tasks

    return Column("backward transfer", read)


def rows_of(records: Iterable[Record], columns: Sequence[Column]) -> pd.DataFrame:
    """A line per run. A measure that a run lacks, such as one of an earlier version, is NaN."""
    lines = []
    for record in records:
        line = {"record": record, "learner": record.method, "memory": record.memory, "seed": record.seed}
        line["expands"] = expands(record.method)
        for column in columns:
            line[column.label] = _value(record.data, column)
        lines.append(line)
    return pd.DataFrame(lines)


def _value(found: Any, column: Column) -> float | None:
    try:
        if callable(column.place):
            return column.place(found)
        for key in column.place.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return column.scale * sum(found) / len(found) if isinstance(found, list) else column.scale * found
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        return None


def named(rows: pd.DataFrame, names: Mapping[Record, str], column: str) -> pd.DataFrame:
    """The lines of the runs that have a name, in the order of ``names``, with the name in a further ``column``."""
    lines = rows.set_index("record").loc[list(names)].reset_index()
    return lines.assign(**{column: lines["record"].map(dict(names))})


def memory_text(memory: float) -> str:
    """A number of exemplars in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"
