"""The runs of a group by name and memory size, as figures show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.measures import named
from pycil_wsc.report.paper import expands
from pycil_wsc.report.style import line_styles
from pycil_wsc.results import ALL, Record

MOST = 16  # lines in a figure that a reader can still distinguish
Read = Callable[[Record], Any]


@dataclass(frozen=True)
class Plot:
    """A figure and the notes below it."""

    slug: str
    title: str
    figure: Figure
    notes: tuple[str, ...] = ()
    folded: bool = False  # collapsed on the page


class Series:
    """The runs of a group outside its studies. A name has the same style in every figure.

    ``rows``: their lines of the group's table of rows, with a ``name``. If there are more than ``MOST`` names, the most
    frequent one of each method is kept first, then those with the most runs.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.options = group, group.options
        rows = named(group.rows, group.names(group.base()), "name")
        methods: dict[str, str] = dict(zip(rows["name"], rows["learner"]))
        runs = Counter(rows["name"])
        first: dict[str, str] = {}
        for name, learner in methods.items():
            if learner not in first or runs[name] > runs[first[learner]]:
                first[learner] = name
        ranked = sorted(methods, key=lambda name: (name not in first.values(), -runs[name]))
        kept = set(ranked[:MOST])
        self.left_out = len(ranked) - len(kept)
        self.methods = {name: method for name, method in methods.items() if name in kept}
        self.styles = line_styles(self.methods)
        self.rows = rows.loc[rows["name"].isin(kept)]
        self.cells: dict[tuple[str, float], list[Record]] = defaultdict(list)
        for record, name in zip(self.rows["record"], self.rows["name"]):
            self.cells[name, record.memory].append(record)
        self.memories = sorted({memory for _, memory in self.cells})

    def of(self, name: str, read: Read | None = None) -> dict[float, list[Record]]:
        """``{memory: records}`` of one name; with ``read``, only records for which it does not return None."""
        found = {}
        for memory in self.memories:
            records = self.cells.get((name, memory), [])
            if read is not None:
                records = [record for record in records if read(record) is not None]
            if records:
                found[memory] = records
        return found

    def shown(self, name: str) -> str:
        """The display name."""
        return self.group.shown(name)

    def place(self, memory: float) -> float:
        """The position of a memory size on an axis. A memory of all images is drawn at twice the largest number."""
        numbers = [number for number in self.memories if number != ALL]
        return 2 * (max(numbers, default=0) or 1) if memory == ALL else memory

    def spread(self, values: Sequence[float]) -> float:
        """Half the length of an error bar: the standard error or deviation; 0 for a single value."""
        if len(values) < 2:
            return 0.0
        deviation = float(np.std(values, ddof=1))
        return deviation / len(values) ** 0.5 if self.options.spread == "se" else deviation

    def notes(self, *notes: str, read: Read | None = None, errors: str = "") -> tuple[str, ...]:
        """Notes on the number of seeds, ``notes``, and notes on missing runs.

        With ``read``, only runs for which it does not return None count. ``errors``: what shows the spread in the
        figure, such as "error bars", if anything does.
        """
        counts = [len(records) for name in self.methods for records in self.of(name, read).values()]
        spread = f"; {errors}: ± {self.options.spread_name}." if errors and max(counts) > 1 else "."
        found = [means_over(counts) + spread, *notes]
        if any(map(expands, self.methods.values())):
            found.append("Dashed lines and hollow markers: methods whose network grows with the tasks.")
        if self.left_out:
            found.append(f"The {self.left_out} further variants with the fewest runs are in the tables.")
        return (*found, *self._missing(read))

    def _missing(self, read: Read | None) -> list[str]:
        parts = []
        for name in self.methods:
            wanted = [memory for memory in self.memories if memory and any(self.of(name))] or list(self.of(name))
            if gaps := [memory_text(memory) for memory in wanted if memory not in self.of(name, read)]:
                parts.append(f"{self.shown(name)} at {', '.join(gaps)}")
        return [f"Missing: {'; '.join(parts)}."] if parts else []


def means_over(counts: Iterable[int]) -> str:
    """A phrase on how many seeds means are over, for the number of seeds of each."""
    fewest, *_, most = sorted(counts) * 2
    if most == 1:
        return "One seed"
    return f"Means over {fewest} seeds" if fewest == most else f"Means over {fewest} to {most} seeds"
