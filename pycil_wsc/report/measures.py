"""The table of rows: a line per run with its method, memory, seed and every measure. All tables are views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from pycil_wsc.report.tables import Column
from pycil_wsc.results import LanguageResult, Record

Measure = Callable[[Mapping[str, Any]], Any]  # reads a number from the contents of a result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


ACCURACIES: Mapping[Column, Measure] = {
    Column("average"): lambda data: data["avg_acc"],
    Column("last"): lambda data: data["last_acc"],
    Column("newest task"): lambda data: data["new_acc"],
    Column("forgetting"): lambda data: data["forgetting"],
    Column("last, top-5"): lambda data: data["top5_curve"][-1],
    Column("task known"): lambda data: _mean(data["task_known_curve"]),
    Column("NME average"): lambda data: _mean(data["nme_curve"]),
}
SPENT = Column("training in this run, s", 0)
COSTS: Mapping[Column, Measure] = {
    Column("training, s", 0): lambda data: data["train_seconds"],
    SPENT: lambda data: data["train_seconds_spent"],
    Column("total, s", 0): lambda data: data["total_seconds"],
    Column("training images", 0, exact=True): lambda data: data["images_trained"],
    Column("peak memory, MiB", 0): lambda data: data["peak_memory_bytes"] / 2**20,
    Column("parameters", 0, exact=True): lambda data: data["parameters"],
}
SCORING: Mapping[Column, Measure] = {
    Column("scoring, s"): lambda data: data["importance_seconds"],
    Column("scoring, MiB"): lambda data: data["importance_bytes"] / 2**20,
    Column("scoring, passes"): lambda data: data["importance_passes"],
}


def scores(version: str) -> dict[Column, Measure]:
    """A language model's scores after the last task, in percent, by one version of the metrics."""

    def of(name: str) -> Measure:
        return lambda data: 100 * data["scores"][version][name]

    return {
        Column("average"): of("last_average"),
        Column("new task"): of("new_score"),
        Column("forgetting"): of("forgetting"),
        Column("backward transfer"): lambda data: backward_transfer(data["scores"][version]["matrix"]),
    }


USE: Mapping[Column, Measure] = {
    Column("minutes", 1): lambda data: data["train_minutes"],
    Column("relative VRAM", 1): lambda data: data["relative_vram_minutes"],
}
LANGUAGE_COSTS: Mapping[Column, Measure] = {
    Column("models resident", 2, True): lambda data: data["models_resident"],
    Column("streamed", 2, True): lambda data: data["models_resident_streamed"],
    Column("relative VRAM, streamed", 1): lambda data: data["relative_vram_minutes_streamed"],
    Column("peak memory (MiB)", 0): lambda data: data["peak_memory_bytes"] / 2**20,
    Column("tokens trained", 0, True): lambda data: data["tokens_trained"],
    Column("tokens per second", 0): lambda data: data["tokens_per_second"],
    Column("padding (%)", 1): lambda data: 100 * data["padding"],
}
IMAGES = {**ACCURACIES, **COSTS, **SCORING}
LANGUAGE = {**scores("trace"), **USE, **LANGUAGE_COSTS}


def backward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    """The mean over all tasks of (final score - score when learned), in percentage points; 0 for the newest task."""
    return sum(100 * (last - row[-1]) for last, row in zip(matrix[-1], matrix)) / len(matrix)


def rows_of(records: Iterable[Record], expands: Callable[[str], bool]) -> pd.DataFrame:
    """A line per run. A measure that a run lacks, such as one of an earlier version, is NaN."""
    lines = []
    for record in records:
        line: dict[str, Any] = {"record": record, "learner": record.method, "memory": record.memory}
        line |= {"seed": record.seed, "expands": expands(record.method)}
        of_kind = LANGUAGE if isinstance(record.result, LanguageResult) else IMAGES
        line |= {column.label: value(read, record) for column, read in of_kind.items()}
        lines.append(line)
    return pd.DataFrame(lines)


def named(rows: pd.DataFrame, names: Mapping[Record, str], column: str) -> pd.DataFrame:
    """The lines of the runs that have a name, with the name in a further ``column``."""
    return rows.assign(**{column: rows["record"].map(dict(names))}).dropna(subset=column)


def value(read: Measure, record: Record) -> float | None:
    """A measure of a run; None if it was not recorded."""
    try:
        return read(record.data)
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        return None
