"""The figures of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pycil_wsc.report.curves import ACCURACY, ANALYSES, LOSS, SCORE, gradients
from pycil_wsc.report.groups import Group
from pycil_wsc.report.maps import confusion_maps, matrix_maps
from pycil_wsc.report.names import clean, studied_value
from pycil_wsc.report.rows import memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.studies import RETAINED
from pycil_wsc.report.style import COLUMN, INK, PAGE, SURFACE, Style, legend, new_figure, wrapped
from pycil_wsc.report.tables import Failed


def figures(group: Group, brief: bool = False) -> Iterator[Plot | Failed]:
    """Yield every :class:`Plot` for which the group has runs, drawn one at a time, or a :class:`Failed` if one fails.

    ``brief``: only the accuracies. Trials, used to choose hyperparameters, are not drawn.
    """
    if group.setting.validation_split:
        return
    parts: list[Callable[[Series], Iterable[Plot]]] = [ACCURACY.draw, over_memory, accuracy_over_time, retain_rates]
    parts += [LOSS.draw, gradients, *(curves.draw for curves in ANALYSES), cost_dots, matrix_maps, confusion_maps]
    if group.tasks:
        parts = [SCORE.draw, partial(over_memory, quantities=SCORES)]
    elif brief:
        parts = [ACCURACY.draw, partial(over_memory, quantities=ACCURACIES[:1])]
    series = Series(group)
    for part in parts:
        try:
            yield from part(series)
        except Exception as error:
            yield Failed(f"a figure of {group.title}", f"{type(error).__name__}: {error}")


# ---- against memory and time -----------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """A column of the rows, and its names in figures. ``axis``: with the series' unit of time in the place of {}."""

    slug: str
    title: str
    axis: str
    column: str


TIME = Quantity("time", "Training time", "training time ({})", "time")
ACCURACIES = (
    Quantity("accuracy", "Average accuracy", "average accuracy (%)", "average"),
    Quantity("forgetting", "Forgetting", "forgetting (percentage points)", "forgetting"),
    Quantity("new-task", "Accuracy on the newest task", "newest task (%)", "newest task"),
    TIME,
)
SCORES = (
    Quantity("score", "Average score", "average score (%)", "average"),
    Quantity("vram", "Relative VRAM usage", "relative VRAM usage (minutes x models)", "relative VRAM"),
)


def over_memory(series: Series, quantities: Sequence[Quantity] = ACCURACIES) -> Iterator[Plot]:
    """Each quantity against the memory size; bars of all quantities if there is a single size."""
    sizes = [memory for memory in series.memories if memory]
    if len(sizes) > 1:
        for quantity in quantities:
            yield _against_memory(series, quantity)
    elif series.memories:
        yield _bars(series, quantities, series.memories[-1])


def _bars(series: Series, quantities: Sequence[Quantity], memory: float) -> Plot:
    """A bar per method at one memory size, with a point per seed; methods without memory are included."""
    sizes = series.rows.groupby("name")["memory"].transform("max")  # its only size, or the one beside 0
    rows = series.rows.loc[series.rows["memory"] == sizes]
    figure, axes, places = _row_axes(series, len(quantities), 1.0, 0.3)
    dots = {"color": SURFACE, "markeredgecolor": INK, "markersize": 3.2, "markeredgewidth": 0.7}
    for ax, quantity in zip(axes, quantities):
        summary = series.summary(rows, "name", quantity.column)
        for name, place in places.items():
            style, own = series.styles[name], rows.loc[rows["name"] == name, quantity.column]
            mean, error = summary.loc[name, ["mean", "error"]]
            hollow = style["markerfacecolor"] != style["color"]
            look: Style = {"linestyle": "--", "color": SURFACE} if hollow else {"color": style["color"]}
            look |= {"edgecolor": style["color"], "alpha": 0.85, "error_kw": {"elinewidth": 0.9}}
            ax.barh(place, mean, 0.62, xerr=error or None, **look)
            if len(own) > 1:
                ax.plot(own, place + np.linspace(-0.15, 0.15, len(own)), "o", **dots)
        ax.set_xlabel(quantity.axis.format(series.unit))
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    notes = ["Each point is one seed."] if rows["name"].value_counts().max() > 1 else []
    without = [series.shown(name) for name in rows.loc[rows["memory"] != memory, "name"].unique()]
    notes += [f"Without memory: {', '.join(without)}."] if without else []
    first, *others = (quantity.title for quantity in quantities)
    title = ", ".join([first, *(other[0].lower() + other[1:] for other in others)])
    where = f"{memory_text(memory)} {series.group.memory_title}"
    return Plot("bars", f"{title}: {where}", figure, series.notes(series.rows, *notes, errors="error bars"))


def _against_memory(series: Series, quantity: Quantity) -> Plot:
    """A quantity against the number of exemplars, with its spread."""
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    for name, own in series.rows.loc[series.rows["memory"] > 0].groupby("name", sort=False):
        line = series.summary(own, "memory", quantity.column)
        places = list(map(series.place, line.index))
        axes.errorbar(places, line["mean"], line["error"], **series.styles[str(name)], elinewidth=0.8)
    memories = [memory for memory in series.memories if memory]
    places = list(map(series.place, memories))
    axes.set_xscale("log")
    axes.set_xticks(places, list(map(memory_text, memories)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.tick_params(axis="x", labelsize=8.5 if len(memories) < 6 else 7.5)
    axes.set(xlabel=series.group.memory_title, ylabel=quantity.axis.format(series.unit))
    if quantity is TIME:
        axes.set_ylim(bottom=0)
    legend(figure, series.styles, series.shown)
    without = ["Runs without memory are not shown."] if 0 in series.memories else []
    notes = series.notes(series.rows, *without, errors="error bars")
    return Plot(f"{quantity.slug}-memory", f"{quantity.title} against memory size", figure, notes)


def accuracy_over_time(series: Series) -> Iterator[Plot]:
    """The paper's first figure: one marker per memory size, whose size grows with the memory."""
    if series.rows.empty:
        return
    figure = new_figure(COLUMN, 4.2)
    axes = figure.subplots()
    for name, style in series.styles.items():
        own = series.rows.loc[series.rows["name"] == name]
        line = series.summary(own, "memory", "average")
        times = own.groupby("memory")["time"].mean()
        axes.plot(times, line["mean"], **style | {"marker": "", "linewidth": 1.1})
        for memory, mean, error in line[["mean", "error"]].itertuples():
            look: Style = style | {"markersize": _marker_size(series, memory, style), "linestyle": "none"}
            axes.errorbar(times[memory], mean, error, **look, elinewidth=0.8)
    _log_scale(axes, series.rows["time"])
    axes.set(xlabel=TIME.axis.format(series.unit), ylabel="average accuracy (%)")
    legend(figure, series.styles, series.shown)
    _size_legend(figure, series)
    notes = series.notes(series.rows, errors="error bars")
    yield Plot("accuracy-time", "Average accuracy against training time", figure, notes)


def retain_rates(series: Series) -> Iterator[Plot]:
    """Accuracy against the share of retained parameters, with and without averaging, per memory size.

    Runs that differ in further keys are lines of their own, with another marker.
    """
    group = series.group
    studied = RETAINED.studied or ()
    rows = group.rows.loc[[RETAINED.row(record) is not None for record in group.records]]
    rows = rows.assign(
        rate=[100 * float(studied_value(record, "wsc.retain")) for record in rows["record"]],
        last=[not studied_value(record, "wsc.average") for record in rows["record"]],
        rest=[group.rest(record, studied) for record in rows["record"]],
    )
    line_of = ["memory", "last", "rest"]
    rows = rows.loc[rows.groupby(line_of)["rate"].transform("nunique") > 1]
    if rows.empty:
        return
    names = group.names(rows["record"], lambda record: record.method, studied)
    rows["variant"] = [clean(names[record].removeprefix("wsc")) for record in rows["record"]]
    memories, rates, variants = sorted(rows["memory"].unique()), sorted(rows["rate"].unique()), rows["variant"].unique()
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    styles: dict[str, Style] = {}
    gaps = []
    for _, own in rows.groupby(line_of):
        memory, last, variant = own.iloc[0][["memory", "last", "variant"]]
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = memory_text(memory) + (" without averaging" if last else "") + variant
        marker = "osD^vPX"[list(variants).index(variant) % 7]
        styles[name] = {"color": colour, "marker": marker, "linestyle": ":" if last else "-"}
        styles[name]["markerfacecolor"] = SURFACE if last else colour
        line = series.summary(own, "rate", "average")
        axes.errorbar(line.index, line["mean"], line["error"], **styles[name], elinewidth=0.8)
        lacking = [f"{rate:.0f}%" for rate in rates if rate not in line.index]
        gaps += [f"{name} at {', '.join(lacking)}"] if lacking else []
    axes.set(xlabel="parameters that keep their weights at the reset (%)", ylabel="average accuracy (%)")
    axes.set_xlim(-3, 103)
    legend(figure, styles, title=group.memory_title)
    several = rows.groupby([*line_of, "rate"]).size().max() > 1
    notes = [f"Error bars: ± {series.options.spread_name}." if several else "One seed."]
    notes += [f"Missing: {'; '.join(gaps)}."] if gaps else []
    yield Plot("retain-rate", "WSC: average accuracy against the retain rate", figure, tuple(notes))


def cost_dots(series: Series) -> Iterator[Plot]:
    """The cost of a run in seconds, images and memory, one row per method."""
    if series.rows.empty:
        return
    figure, axes, places = _row_axes(series, 3, 1.5, 0.32)
    measures = {
        TIME.axis.format(series.unit): series.rows["time"],
        "training images (millions)": series.rows["training images"] / 1e6,
        "peak memory (MiB)": series.rows["peak memory, MiB"],
    }
    for ax, (title, values) in zip(axes, measures.items()):
        means = values.groupby([series.rows["name"], series.rows["memory"]]).mean()
        for name, place in places.items():
            style, own = series.styles[name], means[name]
            ax.plot(own, [place] * len(own), **style | {"marker": "", "linewidth": 1})
            for memory, mean in own.items():
                look: Style = style | {"markersize": _marker_size(series, memory, style)}
                ax.plot([float(mean)], [place], **look)
        if not _log_scale(ax, values):
            ax.set_xlim(0, 1.08 * values.max() or 1)
        ax.set_xlabel(title)
    _size_legend(figure, series)
    yield Plot("cost", "Cost of a run: seconds, images and memory", figure, series.notes(series.rows))


# ---- axes and legends ------------------------------------------------------------------------------------------------


def _row_axes(series: Series, count: int, margin: float, height: float) -> tuple[Figure, list[Axes], dict[str, float]]:
    """A figure with ``count`` axes beside each other, and the place of each method's row, from the bottom."""
    names = list(series.styles)[::-1]
    labels = [wrapped(series.shown(name), 34) for name in names]
    heights = np.array([1 + 0.55 * label.count("\n") for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = new_figure(PAGE, margin + height * heights.sum())
    axes = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    axes[0].set_yticks(places, labels)
    axes[0].set_ylim(0, heights.sum())
    return figure, axes, dict(zip(names, places))


def _marker_size(series: Series, memory: float, style: Style) -> float:
    """The larger the memory, the larger the marker."""
    size = 3.5 + 7 * series.memories.index(memory) / max(1, len(series.memories) - 1)
    return 1.4 * size if style["marker"] == "*" else size


def _size_legend(figure: Figure, series: Series) -> None:
    if len(series.memories) < 2:
        return
    look: Style = {"marker": "o", "linestyle": "none", "markeredgecolor": "#8a8f94", "markerfacecolor": SURFACE}
    dots = []
    for memory in series.memories:
        dots.append(Line2D([], [], markersize=_marker_size(series, memory, look), label=memory_text(memory), **look))
    title = f"marker size: {series.group.memory_title}"
    spacing = {"columnspacing": 1.3, "handletextpad": 0.2}
    figure.legend(handles=dots, loc="outside lower center", ncols=min(9, len(dots)), title=title, **spacing)


def _log_scale(axes: Axes, values: pd.Series) -> bool:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5, if the values suit it."""
    if values.min() <= 0 or values.max() <= 8 * values.min():
        return False
    axes.set_xscale("log")
    axes.set_xlim(values.min() / 1.4, values.max() * 1.4)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return True
