"""The rows of a group as figures show them, and what the figures are."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from pycil_wsc.report.figures.style import line_styles
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import MEASURES, TRAINING, measured, memory_text, scores
from pycil_wsc.report.texts import data_file, texts

MOST = 16  # lines in a figure that a reader can still distinguish
UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}


class Spec(NamedTuple):
    """What a figure or a panel shows: a column of the rows, or what runs recorded. ``figures.json`` declares them."""

    slug: str  # of the figure, and of its curve in ``curves``
    title: str
    axes: tuple[str, str]  # with the series' unit of time in the place of {}
    column: str = ""
    scale: float = 1
    notes: Sequence[str] = ()
    banded: bool = False  # show the spread as a band
    from_zero: bool = False
    in_order: bool = False  # average the first points of the runs, the second ones and so on, wherever they are
    colours: str = ""  # what the colours of a heat map show


SPECS: dict[str, list[Spec]] = {}
for _kind, _entries in data_file("figures.json").items():
    SPECS[_kind] = [Spec(**entry) for entry in _entries]


class Plot(NamedTuple):
    """A figure and the notes below it."""

    slug: str
    title: str
    figure: Figure
    notes: Sequence[str] = ()


class Series:
    """The runs of a group outside its studies. A name has the same style in every figure.

    ``rows``: their part of the group's table of rows, with a ``name``, a column per measure and, in a suitable
    ``unit``, the training ``time``. If there are more than ``MOST`` names, the most frequent one of each method is kept
    first, then those with the most runs.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.spread = {"se": "sem", "sd": "std"}[group.options.spread]  # as pandas calls it
        rows = group.named(group.rows.loc[group.rows["main"]], "name")
        often = pd.DataFrame(rows.groupby("name", sort=False)["learner"].agg(["first", "size"]))
        often = often.sort_values("size", ascending=False, kind="stable")
        ranked = often.assign(again=often["first"].duplicated()).sort_values("again", kind="stable").index
        self.left_out = len(ranked[MOST:])
        self.rows = rows.loc[rows["name"].isin(ranked[:MOST])].copy()
        self.memories: list[float] = sorted(self.rows["memory"].unique())
        methods = dict(zip(self.rows["name"], self.rows["learner"]))
        expanding = set(self.rows.loc[self.rows["expands"], "learner"])
        self.styles = line_styles(methods, expanding)
        self.labels = {name: group.shown(name) for name in methods}
        columns = scores(group.tasks) + MEASURES["use"] if group.tasks else MEASURES["accuracy"] + MEASURES["cost"]
        drawn = {spec.column for specs in SPECS.values() for spec in specs}
        for column in columns:
            if column.label in drawn:  # others, such as a task's name, might be that of another column of the rows
                self.rows[column.label] = measured(self.rows, column)
        seconds = pd.Series(measured(self.rows, TRAINING), self.rows.index)
        self.unit = "hours" if seconds.max() >= 36_000 else "minutes" if seconds.max() >= 180 else "seconds"
        self.rows["time"] = seconds / UNITS[self.unit]

    def axis(self, spec: Spec) -> str:
        """The label of an axis that shows a measure."""
        return spec.axes[1].format(self.unit)

    def notes(self, rows: pd.DataFrame, *further: str, errors: str = "") -> list[str]:
        """Notes on the number of seeds of ``rows``, and ``further``.

        ``errors``: what shows the spread in the figure, such as "error bars", if anything does.
        """
        counts = rows.groupby(["name", "memory"])["record"].nunique()
        seeds = texts("means", counts, errors, self.group.options.spread_name)
        return [*seeds, *further, *texts("figure", self.rows["expands"].any(), self.left_out)]

    def sizes(self, several: str) -> str:
        """A note on the memory sizes of a figure, which begins with ``several`` if there are several."""
        sizes = ", ".join(map(memory_text, self.memories))
        return f"{several if len(self.memories) > 1 else ''}{sizes} {self.group.memory_title}."
