"""The rows of a group as figures show them: by name and memory size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import MEASURES, expands, measured, memory_text, scores
from pycil_wsc.report.style import line_styles
from pycil_wsc.report.tables import notes
from pycil_wsc.results import ALL

MOST = 16  # lines in a figure that a reader can still distinguish


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

    ``rows``: their lines of the group's table of rows, with a ``name`` and, in a suitable ``unit``, the training
    ``time``. If there are more than ``MOST`` names, the most frequent one of each method is kept first, then those with
    the most runs.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.options = group, group.options
        rows = group.named(group.rows.loc[group.rows["main"]], "name")
        columns = (
            [*scores(group.tasks), *MEASURES["use"]] if group.tasks else [*MEASURES["accuracy"], *MEASURES["cost"]]
        )
        for column in columns:
            rows[column.label] = measured(rows, column)
        methods: dict[str, str] = dict(zip(rows["name"], rows["learner"]))
        runs = Counter(rows["name"])
        often = sorted(methods, key=lambda name: -runs[name])
        first = {methods[name]: name for name in reversed(often)}
        ranked = sorted(often, key=lambda name: name not in first.values())
        kept = set(ranked[:MOST])
        self.left_out = len(ranked) - len(kept)
        self.methods = {name: method for name, method in methods.items() if name in kept}
        self.styles = line_styles(self.methods)
        self.labels = {name: group.shown(name) for name in self.methods}
        self.rows = rows.loc[rows["name"].isin(kept)]
        self.memories: list[float] = sorted(self.rows["memory"].unique())
        seconds = self.rows.get("training, s", pd.Series(dtype=float))  # language models have other measures
        self.unit = "hours" if seconds.max() >= 36_000 else "minutes" if seconds.max() >= 180 else "seconds"
        self.rows = self.rows.assign(time=seconds / {"hours": 3600, "minutes": 60, "seconds": 1}[self.unit])

    def place(self, memory: float) -> float:
        """The position of a memory size on an axis. A memory of all images is drawn at twice the largest number."""
        numbers = [number for number in self.memories if number != ALL]
        return 2 * (max(numbers, default=0) or 1) if memory == ALL else memory

    def notes(self, rows: pd.DataFrame, *further: str, errors: str = "") -> tuple[str, ...]:
        """Notes on the number of seeds of ``rows``, ``further``, and notes on missing runs.

        ``errors``: what shows the spread in the figure, such as "error bars", if anything does.
        """
        counts = rows.groupby(["name", "memory"])["record"].nunique()
        spread = f"; {errors}: ± {self.options.spread_name}." if errors and counts.max() > 1 else "."
        found = [means_over(counts) + spread, *further]
        if any(map(expands, self.methods.values())):
            found.append("Dashed lines and hollow markers: methods whose network grows with the tasks.")
        if self.left_out:
            found.append(f"The {self.left_out} further variants with the fewest runs are in the tables.")
        gaps: dict[str, list[str]] = {}
        for name, own in self.rows.groupby("name", sort=False)["memory"]:
            wanted = [memory for memory in self.memories if memory] if own.any() else [0]
            gaps[self.labels[str(name)]] = [memory_text(memory) for memory in wanted if (name, memory) not in counts]
        return *found, *notes("missing", {name: places for name, places in gaps.items() if places})


def means_over(counts: Iterable[int]) -> str:
    """A phrase on how many seeds means are over, for the number of seeds of each."""
    fewest, *_, most = sorted(counts) * 2
    if most == 1:
        return "One seed"
    return f"Means over {fewest} seeds" if fewest == most else f"Means over {fewest} to {most} seeds"
