"""Heat maps of the accuracy on each task after each task, and of the confusion matrix: a panel per method."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import expands
from pycil_wsc.report.series import Plot, Read, Series, means_over
from pycil_wsc.report.style import PAGE, arranged, new_figure
from pycil_wsc.report.tables import DAGGER
from pycil_wsc.results import ALL, Record

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


MATRIX = Map(
    "matrix",
    "Accuracy on each task's classes",
    Normalize(0, 100),
    ("classes of task", "after task"),
    "accuracy (%)",
    1,
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
    for memory, members, place in _by_memory(series, MATRIX, lambda record: record.data["matrix"]):
        means = {name: _mean([_square(record.data["matrix"]) for record in found]) for name, found in members.items()}
        yield _plot(series, MATRIX, memory, means, place)


def confusion_maps(series: Series) -> Iterator[Plot]:
    """The share of each true class's test images (rows) predicted as each class (columns), after the last task.

    Classes are in learning order if all runs have the same one, and else sorted, so that means are over equal classes.
    """
    scale = "The colour scale is a square root, so that small shares are visible."
    for memory, members, place in _by_memory(series, CONFUSION, lambda record: record.data.get("confusion")):
        records = [record for found in members.values() for record in found]
        order = Order.of(records)
        means = {name: _mean([order.shares(record) for record in found]) for name, found in members.items()}
        x, y = (f"{axis} ({order.axis})" for axis in CONFUSION.axes)
        named = place._replace(notes=(order.note, scale, *place.notes))
        yield _plot(series, CONFUSION._replace(axes=(x, y)), memory, means, named, order)


class Order(NamedTuple):
    """The order of the classes in the confusion matrices of a figure."""

    axis: str
    note: str
    learned: bool  # in learning order, in which tasks are neighbours
    names: Sequence[str] = ()
    resorted: bool = False

    @classmethod
    def of(cls, records: Sequence[Record]) -> Order:
        orders = [_learned(record) for record in records]
        names: list[str] = records[0].data.get("class_names") or []
        if all(order and order == orders[0] for order in orders):
            return cls("learning order", "Classes are in learning order; lines separate the tasks.", True, names)
        if all(order and sorted(order) == sorted(orders[0]) for order in orders):
            sorted_names = [names[i] for i in np.argsort(orders[0])] if len(names) == len(orders[0]) else []
            note = "Classes are sorted by their label, because the runs learned them in different orders."
            return cls("sorted by label", note, False, sorted_names, True)
        note = "Row k is the k-th class that a run learned; the runs' orders differ, or were not recorded."
        return cls("place in the learning order", note, True)

    def shares(self, record: Record) -> np.ndarray:
        """The confusion matrix in percent of the true class's images, in this order."""
        counts: np.ndarray = np.array(record.data["confusion"], dtype=float)
        if self.resorted:
            places = np.argsort(_learned(record))
            counts = np.take(np.take(counts, places, 0), places, 1)
        return 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _learned(record: Record) -> list[Any]:
    """The labels of the classes in the order of the confusion matrix, or [] if they were not recorded."""
    order = record.data.get("class_order")
    size = len(record.data["confusion"])
    if not isinstance(order, list) or len(order) < size or not all(isinstance(label, int) for label in order):
        return []
    return order[:size]


class Place(NamedTuple):
    """Of a figure: over how many seeds it is, its notes, and whether it is collapsed on the page."""

    over: str
    notes: tuple[str, ...]
    folded: bool


def _by_memory(series: Series, kind: Map, read: Read) -> Iterator[tuple[float, dict[str, list[Record]], Place]]:
    """The runs by name, and notes on them, for each memory size that is drawn."""
    sizes = [size for size in series.memories if any(size in series.of(name, read) for name in series.methods)]
    between = [size for size in sizes if size][1:-1]  # all but the smallest and the largest memory
    undrawn = [] if series.options.all_figures or len(between) <= FOLDED else between
    skipped = f"Not drawn: {', '.join(map(memory_text, undrawn))} {series.group.memory_title}"
    more = [f"{skipped}; --all-figures draws them."] if undrawn else []
    for memory in sizes:
        if memory in undrawn:
            continue
        members, lacking = {}, []
        for name in series.methods:
            if memory in (found := series.of(name, read)):
                members[name] = found[memory]
            elif memory in series.of(name) or memory and any(series.of(name)):
                lacking.append(series.shown(name))
        missing = [f"Missing: {', '.join(lacking)}."] if lacking else []
        over = f"{means_over(map(len, members.values()))}."
        yield memory, members, Place(over, (*missing, *more), memory in between)


def _plot(
    series: Series, kind: Map, memory: float, maps: dict[str, np.ndarray], place: Place, order: Order | None = None
) -> Plot:
    rows, columns = arranged(len(maps))
    figure = new_figure(min(PAGE, 2.75 * columns + 0.9), 2.75 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (name, values) in zip(axes, maps.items()):
        size, first = len(values), kind.first
        extent = (first - 0.5, first + size - 0.5, first + size - 0.5, first - 0.5)
        image = ax.imshow(values, "viridis", kind.norm, extent=extent, interpolation="none")
        shown = series.shown(name) + f" {DAGGER}" * expands(series.methods[name])
        ax.set_title(textwrap.fill(shown, 34), fontsize=8.5 if len(shown) < 40 else 6.5)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5 if first == 0 else 10, integer=True))
        ax.set(xlabel=kind.axes[0], ylabel=kind.axes[1])
        if order is None and size <= NUMBERED:
            _write_numbers(ax, values, kind)
        if order is not None:
            _name_classes(ax, order.names, size)
            setting = series.group.setting
            borders = range(setting.init_cls, size, setting.increment) if order.learned and setting.increment else ()
            for border in borders:
                ax.axhline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)
                ax.axvline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)
    for empty in axes[len(maps) :]:
        empty.set_visible(False)
    shrink = min(1, 0.9 if rows == 1 else 1.6 / rows)
    figure.colorbar(image, ax=axes, label=kind.unit, shrink=shrink, aspect=24, pad=0.015)
    name = "all" if memory == ALL else memory
    title = f"{kind.title}, {memory_text(memory)} {series.group.memory_title}"
    return Plot(f"{kind.slug}-m{name}", title, figure, (place.over, *place.notes), place.folded)


def _write_numbers(ax: Axes, values: np.ndarray, kind: Map) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "#ffffff" if kind.norm(value) < 0.6 else "#000000"
            at = {"ha": "center", "va": "center", "fontsize": 6.2, "color": colour}
            ax.text(column + kind.first, row + kind.first, f"{value:.0f}", **at).set_in_layout(False)


def _name_classes(ax: Axes, names: Sequence[str], size: int) -> None:
    """Write class names at the axes if there is room."""
    if len(names) != size or size > NAMED:
        return
    short = [textwrap.shorten(clean(name), LONG, placeholder="…") or clean(name)[:LONG] for name in names]
    ax.set_xticks(range(size), short, rotation=90, fontsize=6.5)
    ax.set_yticks(range(size), short, fontsize=6.5)


def _mean(maps: Sequence[np.ndarray]) -> np.ndarray:
    """Mean of the maps that have the size of the first one."""
    return np.mean([values for values in maps if values.shape == maps[0].shape], axis=0)


def _square(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """A lower triangle as a square matrix with NaN above the diagonal."""
    return np.array([[*row, *[np.nan] * (len(rows) - len(row))] for row in rows])
