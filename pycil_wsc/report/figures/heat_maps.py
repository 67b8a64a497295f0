"""Heat maps of the accuracy on each task after each task, and of the confusion matrix: a panel per method."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pycil_wsc.errors import one_line
from pycil_wsc.report.figures.series import SPECS, Plot, Series, Spec
from pycil_wsc.report.figures.style import PAGE, arranged
from pycil_wsc.report.rows import memory_text
from pycil_wsc.report.texts import texts
from pycil_wsc.results import Record

NUMBERED = 10  # numbers are written for at most this many tasks
NAMED = 20  # class names are written for at most this many classes
SIZES = 4  # memory sizes that are all drawn; of more, only the smallest and the largest
LONG = 18  # longest class name in characters; longer ones are cut
MATRIX, CONFUSION = SPECS["maps"]


def matrix_maps(series: Series) -> Iterator[Plot]:
    """Accuracy on each task's classes (columns) after each task (rows)."""
    maps = []
    for record in series.rows["record"]:
        columns = zip_longest(*record.data["matrix"], fillvalue=np.nan)  # rows are as long as the tasks learned
        maps.append(np.array(list(columns), dtype=float).T)
    yield from _heat_maps(series, series.rows.assign(map=maps), MATRIX, Normalize(0, 100))


def confusion_maps(series: Series) -> Iterator[Plot]:
    """The fraction of each true class's test images (rows) predicted as each class (columns), after the last task.

    Classes are in learning order if all runs have the same one, and else sorted, so that means are over equal classes.
    """
    rows = series.rows.loc[[bool(record.data.get("confusion")) for record in series.rows["record"]]]
    if rows.empty:
        return
    records: list[Record] = list(rows["record"])
    matrices = [np.array(record.data["confusion"], dtype=float) for record in records]
    orders = [(record.data.get("class_order") or [])[: len(counts)] for record, counts in zip(records, matrices)]
    first = orders[0]
    names = records[0].data.get("class_names") or []
    order = "learned"
    axis = "learning order"
    if len(first) < len(matrices[0]) or any(sorted(other) != sorted(first) for other in orders):
        order = "unknown"
        axis = "place in the learning order"
        names = []
    elif any(other != first for other in orders):
        order = "sorted"
        axis = "sorted by label"
        names = list(np.array(names)[np.argsort(first)]) if len(names) == len(first) else []
    maps = []
    for counts, learned in zip(matrices, orders):
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        places = np.argsort(learned) if order == "sorted" else np.arange(len(counts))
        maps.append(shares[np.ix_(places, places)])
    across, down = CONFUSION.axes
    spec = CONFUSION._replace(axes=(across.format(axis), down.format(axis)), notes=texts("confusion", order))
    yield from _heat_maps(series, rows.assign(map=maps), spec, PowerNorm(0.5, 0, 100), names)


def _heat_maps(
    series: Series, rows: pd.DataFrame, spec: Spec, norm: Normalize, names: Sequence[str] = ()
) -> Iterator[Plot]:
    """A figure per memory size, with a panel per method: the mean of its runs' ``map``, with ``names`` of its rows.

    Of many memory sizes, only the outermost are drawn.
    """
    sizes = sorted(set(rows["memory"]) - {0})
    undrawn = [] if series.group.options.all_figures or len(sizes) <= SIZES else sizes[1:-1]
    unit = series.group.memory_title
    more = texts("undrawn", [memory_text(memory) for memory in undrawn], unit)
    for memory, runs in rows.loc[~rows["memory"].isin(undrawn)].groupby("memory"):
        methods = runs.groupby("name", sort=False)["map"]
        down, across = arranged(len(methods))
        figure = Figure((min(PAGE, 2.75 * across + 0.9), 2.75 * down + 0.3))
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for ax, (name, maps) in zip(axes, methods):
            same = [values for values in maps if values.shape == maps.iloc[0].shape]
            ax.set_title(textwrap.fill(series.labels[str(name)], 34), fontsize=8)
            ax.set(xlabel=spec.axes[0], ylabel=spec.axes[1])
            _draw_map(ax, np.mean(same, axis=0), norm, names, spec is MATRIX)
        for empty in axes[len(methods) :]:
            empty.set_visible(False)
        figure.colorbar(
            axes[0].images[0], ax=axes[: len(methods)], label=spec.colours, shrink=min(1, 1.6 / down), aspect=24
        )
        size = memory_text(memory)
        notes = [*texts("means", methods.size()), *spec.notes, *more]
        slug = f"{spec.slug}-m{size.replace(',', '')}"
        yield Plot(slug, f"{spec.title}, {size} {unit}", figure, notes)


def _draw_map(ax: Axes, values: np.ndarray, norm: Normalize, names: Sequence[str], numbered: bool) -> None:
    """Draw ``values`` with ``names`` of its rows; if ``numbered``, rows count from 1 and cells show their values."""
    count = len(values)
    first = int(numbered)
    extent = (first - 0.5, first + count - 0.5, first + count - 0.5, first - 0.5)
    ax.imshow(values, "viridis", norm, extent=extent, interpolation="none")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
    if len(names) == count <= NAMED:
        short = [textwrap.shorten(one_line(name), LONG, placeholder="…") or one_line(name)[:LONG] for name in names]
        ax.set_xticks(range(count), short, rotation=90, fontsize=6.5)
        ax.set_yticks(range(count), short, fontsize=6.5)
    if not numbered or count > NUMBERED:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "#ffffff" if norm(value) < 0.6 else "#000000"
            text = ax.text(column + first, row + first, f"{value:.0f}", color=colour, fontsize=6.2)
            text.set(ha="center", va="center", in_layout=False)
