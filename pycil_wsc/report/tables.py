"""Tables and their cells, written by :mod:`pycil_wsc.report.formats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pycil_wsc.report.stats import Seeds, mean_and_error, standard_deviation

Measure = Callable[[Mapping[str, Any]], Any]  # reads a number from the contents of a result
DAGGER = "†"  # marks methods that expand


class Column(NamedTuple):
    label: str
    decimals: int = 2
    exact: bool = False  # a count: the same in every seed
    signed: bool = False  # a difference


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a number per seed, and the paper's value as (mean, standard error or None)."""

    seeds: Seeds = field(default_factory=dict)
    paper: tuple[float, float | None] | None = None
    compared: bool = False  # whether the runs have the paper's schedule
    best: bool = False

    @property
    def values(self) -> list[float]:
        return list(self.seeds.values())

    @cached_property
    def mean(self) -> float | None:
        return mean_and_error(self.values)[0] if self.seeds else None

    @cached_property
    def error(self) -> float | None:
        """The standard error of the mean; None for a single seed."""
        return mean_and_error(self.values)[1] if self.seeds else None

    @cached_property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds; None for a single seed."""
        return standard_deviation(self.values)

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's, or None if it does not exceed the sum of the two standard errors."""
        if not self.compared or self.paper is None or self.mean is None or self.error is None or self.paper[1] is None:
            return None
        difference = self.mean - self.paper[0]
        return difference if abs(difference) > self.error + self.paper[1] else None


class Row(NamedTuple):
    labels: tuple[Any, ...]  # one per heading in the table's ``corner``
    expands: bool
    cells: tuple[Cell, ...]
    comparable: bool = True  # False if it differs from other rows in more than the table's subject; then never bold


class Failed(NamedTuple):
    """A table or figure that failed, and the reason."""

    what: str
    why: str


def by_name(name: Any) -> str:
    return str(name)


@dataclass(frozen=True)
class Table:
    """``rows`` of cells under ``columns``, with ``notes`` and notes on ``missing`` runs below.

    ``spread``: whether ± is the standard error (``se``) or the standard deviation (``sd``). ``shown``: maps a label in
    the first column to its display name; the CSV keeps the label.
    """

    slug: str
    title: str
    setting: str
    corner: tuple[str, ...]  # headings of the label columns
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    over: str = ""  # heading above the columns
    beside: int = 0  # number of last columns that are not under this heading
    spread: str = "se"
    shown: Callable[[Any], str] = by_name

    @property
    def full_title(self) -> str:
        return f"{self.title}. {self.setting}" if self.setting else self.title


def measured(read: Measure, records: list[Any]) -> Seeds:
    """The value of a measure in each record, by seed, or by (memory, seed) if the records have several memory sizes.

    Records without the measure, such as those of earlier versions, are left out.
    """
    values = {}
    several = len({record.memory for record in records}) > 1
    for record in records:
        try:
            value = read(record.data)
        except (KeyError, TypeError, IndexError, ZeroDivisionError):
            continue
        if value is not None:
            values[(record.memory, record.seed) if several else record.seed] = value
    return values
