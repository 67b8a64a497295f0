"""Heat maps of the accuracy on each task after each task, and of the confusion matrix: a panel per method."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.names import clean
from pycil_wsc.report.rows import memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.style import PAGE, arranged, new_figure
from pycil_wsc.report.texts import texts
from pycil_wsc.results import Record

NUMBERED = 10  # numbers are written for at most this many tasks
NAMED = 20  # class names are written for at most this many classes
FOLDED = 2  # with more memory sizes between the smallest and the largest, these are not drawn
LONG = 18  # longest class name in characters; longer ones are cut


@dataclass(frozen=True)
class Maps:
    """A figure per memory size: a panel per method with the mean of its runs' matrices. ``first`` numbers the rows."""

    slug: str
    title: str
    axes: tuple[str, str]
    unit: str
    norm: Normalize
    first: int = 0
    names: Sequence[str] = ()  # of the rows and columns
    notes: Sequence[str] = ()

    def draw(self, series: Series, rows: pd.DataFrame) -> Iterator[Plot]:
        """The figures of ``rows``, which have a ``map`` each. Of many memory sizes, only the outermost are drawn."""
        between = sorted(set(rows["memory"]) - {0})[1:-1]
        undrawn = [] if series.group.options.all_figures or len(between) <= FOLDED else between
        unit = series.group.memory_title
        more = texts("undrawn", [memory_text(memory) for memory in undrawn], unit)
        for memory in sorted(set(rows["memory"]) - set(undrawn)):
            own = rows.loc[rows["memory"] == memory].groupby("name", sort=False)["map"]
            down, across = arranged(len(own))
            figure = new_figure(min(PAGE, 2.75 * across + 0.9), 2.75 * down + 0.3)
            axes = figure.subplots(down, across, squeeze=False).ravel()
            for ax, (name, found) in zip(axes, own):
                same = [values for values in found if values.shape == found.iloc[0].shape]
                ax.set_title(textwrap.fill(series.labels[str(name)], 34), fontsize=8)
                self._panel(ax, np.mean(same, axis=0))
            for empty in axes[len(own) :]:
                empty.set_visible(False)
            figure.colorbar(axes[0].images[0], ax=axes, label=self.unit, shrink=min(1, 1.6 / down), aspect=24)
            size = memory_text(memory)
            below = [*texts("means", own.size()), *self.notes, *more]
            slug = f"{self.slug}-m{size.replace(',', '')}"
            yield Plot(slug, f"{self.title}, {size} {unit}", figure, below, memory in between)

    def _panel(self, ax: Axes, values: np.ndarray) -> None:
        count, first = len(values), self.first
        extent = (first - 0.5, first + count - 0.5, first + count - 0.5, first - 0.5)
        ax.imshow(values, "viridis", self.norm, extent=extent, interpolation="none")
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set(xlabel=self.axes[0], ylabel=self.axes[1])
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        if len(self.names) == count <= NAMED:
            short = [textwrap.shorten(clean(name), LONG, placeholder="…") or clean(name)[:LONG] for name in self.names]
            ax.set_xticks(range(count), short, rotation=90, fontsize=6.5)
            ax.set_yticks(range(count), short, fontsize=6.5)
        if not first or count > NUMBERED:
            return
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "#ffffff" if self.norm(value) < 0.6 else "#000000"
                at = {"ha": "center", "va": "center", "fontsize": 6.2, "color": colour}
                ax.text(column + first, row + first, f"{value:.0f}", **at).set_in_layout(False)


def matrix_maps(series: Series) -> Iterator[Plot]:
    """Accuracy on each task's classes (columns) after each task (rows)."""
    maps = []
    for record in series.rows["record"]:
        columns = zip_longest(*record.data["matrix"], fillvalue=np.nan)  # rows are as long as the tasks learned
        maps.append(np.array(list(columns), dtype=float).T)
    axes, title = ("classes of task", "after task"), "Accuracy on each task's classes"
    kind = Maps("matrix", title, axes, "accuracy (%)", Normalize(0, 100), 1)
    yield from kind.draw(series, series.rows.assign(map=maps))


def confusion_maps(series: Series) -> Iterator[Plot]:
    """The share of each true class's test images (rows) predicted as each class (columns), after the last task.

    Classes are in learning order if all runs have the same one, and else sorted, so that means are over equal classes.
    """
    rows = series.rows.loc[[bool(record.data.get("confusion")) for record in series.rows["record"]]]
    if rows.empty:
        return
    records = list(rows["record"])
    orders = [_learned(record) for record in records]
    known = [sorted(order) == sorted(orders[0]) for order in orders if order]
    order, names = "learned", records[0].data.get("class_names") or []
    if not orders[0] or len(known) < len(orders) or not all(known):
        order, names = "unknown", []
    elif orders.count(orders[0]) < len(orders):
        order = "sorted"
        names = list(np.array(names)[np.argsort(orders[0])]) if len(names) == len(orders[0]) else []
    maps = []
    for record, learned in zip(records, orders):
        counts = np.array(record.data["confusion"], dtype=float)
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        places = np.argsort(learned) if order == "sorted" else np.arange(len(counts))
        maps.append(shares[np.ix_(places, places)])
    axis = {"learned": "learning order", "sorted": "sorted by label", "unknown": "place in the learning order"}[order]
    axes = f"predicted class ({axis})", f"true class ({axis})"
    unit, norm = "share of the true class's images (%)", PowerNorm(0.5, 0, 100)
    kind = Maps("confusion", "Confusion after the last task", axes, unit, norm, 0, names, texts("confusion", order))
    yield from kind.draw(series, rows.assign(map=maps))


def _learned(record: Record) -> list[int]:
    """The labels of the classes in the order of the confusion matrix, or [] if they were not recorded."""
    order = record.data.get("class_order")
    size = len(record.data["confusion"])
    if not isinstance(order, list) or len(order) < size or not all(isinstance(label, int) for label in order):
        return []
    return order[:size]
