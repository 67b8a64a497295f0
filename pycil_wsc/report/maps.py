"""Heat maps of the accuracy on each task after each task, and of the confusion matrix: a panel per method."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import expands
from pycil_wsc.report.rows import memory_text
from pycil_wsc.report.series import Plot, Series, means_over
from pycil_wsc.report.style import PAGE, arranged, new_figure
from pycil_wsc.report.tables import DAGGER
from pycil_wsc.results import Record

NUMBERED = 10  # numbers are written for at most this many tasks
NAMED = 20  # class names are written for at most this many classes
FOLDED = 2  # with more memory sizes between the smallest and the largest, these are not drawn
LONG = 18  # longest class name in characters; longer ones are cut


class Map(NamedTuple):
    """What the panels of a figure share. ``first``: the number of the first row and column."""

    slug: str
    title: str
    norm: Normalize
    axes: tuple[str, str]
    unit: str
    first: int
    names: Sequence[str] = ()  # of the rows and columns
    borders: Sequence[int] = ()  # rows and columns before which a line is drawn
    numbered: bool = False

    def draw(self, ax: Axes, values: np.ndarray) -> None:
        count, first = len(values), self.first
        extent = (first - 0.5, first + count - 0.5, first + count - 0.5, first - 0.5)
        ax.imshow(values, "viridis", self.norm, extent=extent, interpolation="none")
        ax.grid(False)
        ax.spines[:].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5 if first == 0 else 10, integer=True))
        ax.set(xlabel=self.axes[0], ylabel=self.axes[1])
        for (row, column), value in np.ndenumerate(values):
            if self.numbered and count <= NUMBERED and np.isfinite(value):
                colour = "#ffffff" if self.norm(value) < 0.6 else "#000000"
                at = {"ha": "center", "va": "center", "fontsize": 6.2, "color": colour}
                ax.text(column + first, row + first, f"{value:.0f}", **at).set_in_layout(False)
        if len(self.names) == count <= NAMED:
            short = [textwrap.shorten(clean(name), LONG, placeholder="…") or clean(name)[:LONG] for name in self.names]
            ax.set_xticks(range(count), short, rotation=90, fontsize=6.5)
            ax.set_yticks(range(count), short, fontsize=6.5)
        for border in self.borders:
            if border < count:
                ax.axhline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)
                ax.axvline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)


MATRIX = Map(
    "matrix", "Accuracy on each task's classes", Normalize(0, 100), ("classes of task", "after task"), "accuracy (%)", 1
)
CONFUSION = Map(
    "confusion",
    "Confusion after the last task",
    PowerNorm(0.5, 0, 100),
    ("predicted class", "true class"),
    "share of the true class's images (%)",
    0,
)


def matrix_maps(series: Series) -> Iterator[Plot]:
    """Accuracy on each task's classes (columns) after each task (rows)."""
    for size in _sizes(series, series.recorded(lambda record: record.data["matrix"])):
        yield _plot(series, MATRIX._replace(numbered=True), size, map(_square, size.rows["recorded"]))


def confusion_maps(series: Series) -> Iterator[Plot]:
    """The share of each true class's test images (rows) predicted as each class (columns), after the last task.

    Classes are in learning order if all runs have the same one, and else sorted, so that means are over equal classes.
    """
    scale = "The colour scale is a square root, so that small shares are visible."
    setting = series.group.setting
    for size in _sizes(series, series.recorded(lambda record: record.data.get("confusion"))):
        records = list(size.rows["record"])
        orders = [_learned(record) for record in records]
        names: list[str] = records[0].data.get("class_names") or []
        kind, places = CONFUSION, [list(range(len(record.data["confusion"]))) for record in records]
        axis, note = "learning order", "Classes are in learning order; lines separate the tasks."
        if not all(order and order == orders[0] for order in orders):
            axis = "place in the learning order"
            note = "Row k is the k-th class that a run learned; the runs' orders differ, or were not recorded."
            if all(order and sorted(order) == sorted(orders[0]) for order in orders):
                axis = "sorted by label"
                note = "Classes are sorted by their label, because the runs learned them in different orders."
                places = [list(np.argsort(order)) for order in orders]
                names = [names[i] for i in places[0]] if len(names) == len(orders[0]) else []
            else:
                names = []
        if axis != "sorted by label" and setting.increment:
            kind = kind._replace(borders=range(setting.init_cls, len(places[0]), setting.increment))
        kind = kind._replace(names=names, axes=tuple(f"{label} ({axis})" for label in kind.axes))
        size = size._replace(notes=(size.notes[0], note, scale, *size.notes[1:]))
        yield _plot(series, kind, size, map(_shares, records, places))


def _learned(record: Record) -> list[int]:
    """The labels of the classes in the order of the confusion matrix, or [] if they were not recorded."""
    order = record.data.get("class_order")
    size = len(record.data["confusion"])
    if not isinstance(order, list) or len(order) < size or not all(isinstance(label, int) for label in order):
        return []
    return order[:size]


def _shares(record: Record, places: list[int]) -> np.ndarray:
    """The confusion matrix in percent of the true class's images, with the classes in this order."""
    counts = np.array(record.data["confusion"], dtype=float)[np.ix_(places, places)]
    return 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _square(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """A lower triangle as a square matrix with NaN above the diagonal."""
    return np.array([[*row, *[np.nan] * (len(rows) - len(row))] for row in rows])


class Size(NamedTuple):
    """The runs with one size of memory, the notes below their figure, and whether it is collapsed on the page."""

    memory: float
    rows: pd.DataFrame
    notes: tuple[str, ...]
    folded: bool


def _sizes(series: Series, rows: pd.DataFrame) -> Iterator[Size]:
    """The sizes of memory that are drawn: of many, only none, the smallest and the largest."""
    between = sorted(set(rows["memory"]) - {0})[1:-1]
    undrawn = [] if series.options.all_figures or len(between) <= FOLDED else between
    more = f"Not drawn: {', '.join(map(memory_text, undrawn))} {series.group.memory_title}; --all-figures draws them."
    for memory in sorted(rows["memory"].unique()):
        if memory in undrawn:
            continue
        own = rows.loc[rows["memory"] == memory]
        wanted = series.rows.loc[(series.rows["memory"] > 0) == (memory > 0), "name"].unique()
        lacking = [series.shown(name) for name in wanted if name not in set(own["name"])]
        notes = [f"{means_over(own['name'].value_counts())}."]
        notes += [f"Missing: {', '.join(lacking)}."] if lacking else []
        notes += [more] if undrawn else []
        yield Size(memory, own, tuple(notes), memory in between)


def _plot(series: Series, kind: Map, size: Size, maps: Iterable[np.ndarray]) -> Plot:
    """A panel per name with the mean of its maps that have the size of the first one."""
    own = size.rows.assign(map=list(maps)).groupby("name", sort=False)["map"]
    rows, columns = arranged(len(own))
    figure = new_figure(min(PAGE, 2.75 * columns + 0.9), 2.75 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (name, found) in zip(axes, own):
        same = [values for values in found if values.shape == found.iloc[0].shape]
        shown = series.shown(str(name)) + f" {DAGGER}" * expands(series.methods[str(name)])
        ax.set_title(textwrap.fill(shown, 34), fontsize=8.5 if len(shown) < 40 else 6.5)
        kind.draw(ax, np.mean(same, axis=0))
    for empty in axes[len(own) :]:
        empty.set_visible(False)
    shrink = min(1, 0.9 if rows == 1 else 1.6 / rows)
    figure.colorbar(axes[0].images[0], ax=axes, label=kind.unit, shrink=shrink, aspect=24, pad=0.015)
    memory = memory_text(size.memory)
    title = f"{kind.title}, {memory} {series.group.memory_title}"
    return Plot(f"{kind.slug}-m{memory.replace(',', '')}", title, figure, size.notes, size.folded)
