"""Heat maps of the accuracy on each task after each task, and of the confusion matrix.

There is a figure per memory size, with a panel per method.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import expands
from pycil_wsc.report.series import Plot, Read, Series, means_over
from pycil_wsc.report.style import PAGE, arranged, new_figure
from pycil_wsc.report.tables import DAGGER
from pycil_wsc.results import ALL, Record

COLOURS = colormaps["viridis"]
NUMBERED = 10  # numbers are written for at most this many tasks
NAMED = 20  # class names are written for at most this many classes
FOLDED = 2  # with more memory sizes between the smallest and the largest, these are not drawn
LONG = 18  # longest class name in characters; longer ones are cut


def matrix_maps(series: Series) -> Iterator[Plot]:
    """Accuracy on each task's classes (columns) after each task (rows)."""
    yield from _maps(
        series,
        "matrix",
        "Accuracy on each task's classes",
        lambda record: record.data["matrix"],
        lambda record: _lower(record.data["matrix"]),
        Normalize(0, 100),
        ("classes of task", "after task"),
        "accuracy (%)",
        1,
        (),
    )


def confusion_maps(series: Series) -> Iterator[Plot]:
    """The share of each true class's test images (rows) predicted as each class (columns), after the last task."""
    yield from _maps(
        series,
        "confusion",
        "Confusion after the last task",
        lambda record: record.data.get("confusion"),
        lambda record: _shares(record.data["confusion"]),
        PowerNorm(0.5, 0, 100),
        ("predicted class", "true class"),
        "share of the true class's images (%)",
        0,
        (
            "Classes are in learning order; lines separate the tasks.",
            "The colour scale is a square root, so that small shares are visible.",
        ),
    )


def _maps(
    series: Series,
    slug: str,
    title: str,
    present: Read,
    read: Callable[[Record], np.ndarray],
    norm: Normalize,
    axes: tuple[str, str],
    unit: str,
    first: int,
    notes: Sequence[str],
) -> Iterator[Plot]:
    sizes = [size for size in series.memories if any(size in series.of(name, present) for name in series.methods)]
    between = [size for size in sizes if size][1:-1]  # all but the smallest and the largest memory
    undrawn = [] if series.options.all_figures or len(between) <= FOLDED else between
    skipped = f"Not drawn: {', '.join(map(memory_text, undrawn))} {series.group.memory_title}"
    more = [f"{skipped}; --all-figures draws them."] if undrawn else []
    for memory in sizes:
        if memory in undrawn:
            continue
        members = {name: found[memory] for name in series.methods if memory in (found := series.of(name, present))}
        means = {name: _mean([read(record) for record in records]) for name, records in members.items()}
        figure = _draw(means, series, norm, axes, unit, first)
        if slug == "confusion":
            _name_classes(figure, [record for records in members.values() for record in records])
        over = f"{means_over(map(len, members.values()))}."
        lacking = [
            series.shown(name)
            for name in series.methods
            if name not in members and (memory in series.of(name) or memory and any(series.of(name)))
        ]
        missing = [f"Missing: {', '.join(lacking)}."] if lacking else []
        yield Plot(
            f"{slug}-m{'all' if memory == ALL else memory}",
            f"{title}, {memory_text(memory)} {series.group.memory_title}",
            figure,
            (over, *notes, *missing, *more),
            memory in between,
        )


def _draw(
    maps: Mapping[str, np.ndarray], series: Series, norm: Normalize, labels: tuple[str, str], unit: str, first: int
) -> Figure:
    rows, columns = arranged(len(maps))
    figure = new_figure(min(PAGE, 2.75 * columns + 0.9), 2.75 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (name, values) in zip(axes, maps.items()):
        size = len(values)
        image = ax.imshow(
            values,
            COLOURS,
            norm,
            extent=(first - 0.5, first + size - 0.5, first + size - 0.5, first - 0.5),
            interpolation="none",
        )
        shown = series.shown(name) + f" {DAGGER}" * expands(series.methods[name])
        ax.set_title(textwrap.fill(shown, 34), fontsize=8.5 if len(shown) < 40 else 6.5)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5 if first == 0 else 10, integer=True))
        ax.set(xlabel=labels[0], ylabel=labels[1])
        if first and size <= NUMBERED:
            _write_numbers(ax, values, norm, first)
        if not first:
            _separate_tasks(ax, series.group.setting, size)
    for empty in axes[len(maps) :]:
        empty.set_visible(False)
    figure.colorbar(image, ax=axes, label=unit, shrink=min(1, 0.9 if rows == 1 else 1.6 / rows), aspect=24, pad=0.015)
    return figure


def _write_numbers(ax: Axes, values: np.ndarray, norm: Normalize, first: int) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "#ffffff" if norm(value) < 0.6 else "#000000"
            at = {"ha": "center", "va": "center", "fontsize": 6.2, "color": colour}
            ax.text(column + first, row + first, f"{value:.0f}", **at).set_in_layout(False)


def _separate_tasks(ax: Axes, setting: Any, classes: int) -> None:
    for border in range(setting.init_cls, classes, setting.increment) if setting.increment else ():
        ax.axhline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)
        ax.axvline(border - 0.5, color="#ffffff", linewidth=0.35, alpha=0.55)


def _name_classes(figure: Figure, records: Sequence[Record]) -> None:
    """Write class names at the axes if there is room and all runs learned the classes in the same order."""
    names = records[0].data.get("class_names") or []
    if not 0 < len(names) <= NAMED or any(record.data.get("class_names") != names for record in records):
        return
    names = [textwrap.shorten(clean(name), LONG, placeholder="…") or clean(name)[:LONG] for name in names]
    for ax in figure.axes:
        if ax.images and ax.get_xlabel():
            ax.set_xticks(range(len(names)), names, rotation=90, fontsize=6.5)
            ax.set_yticks(range(len(names)), names, fontsize=6.5)


def _mean(maps: Sequence[np.ndarray]) -> np.ndarray:
    """Mean of the maps that have the size of the first one."""
    return np.mean([values for values in maps if values.shape == maps[0].shape], axis=0)


def _lower(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """A lower triangle as a square matrix with NaN above the diagonal."""
    return np.array([[*row, *[np.nan] * (len(rows) - len(row))] for row in rows])


def _shares(counts: Sequence[Sequence[float]]) -> np.ndarray:
    """Convert counts to percentages of their row."""
    array = np.array(counts, dtype=float)
    return 100 * array / np.maximum(array.sum(1, keepdims=True), 1)
