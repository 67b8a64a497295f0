"""The figures of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pycil_wsc.report.curves import ACCURACY, ANALYSES, LOSS, SCORE, gradients
from pycil_wsc.report.groups import Group, changed_keys, memory_text, studied_value
from pycil_wsc.report.maps import confusion_maps, matrix_maps
from pycil_wsc.report.names import clean
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.studies import RETAIN
from pycil_wsc.report.style import COLUMN, PAGE, SURFACE, Style, legend, new_figure, wrapped
from pycil_wsc.report.tables import Failed
from pycil_wsc.results import Record

__all__ = ["Plot", "figures", "language_figures"]
Draw = Callable[[Series], Iterable[Plot]]


def figures(group: Group, brief: bool = False) -> Iterator[Plot | Failed]:
    """Yield every :class:`Plot` for which the group has runs, drawn one at a time.

    A figure that fails does not affect the others. ``brief``: only the accuracies.
    """
    if group.setting.validation_split:
        return  # trials, used to choose hyperparameters, are not drawn
    if brief:
        yield from draw_plots(group, [ACCURACY.draw, lambda series: over_memory(series, ACCURACIES[:1])])
        return
    analyses = [gradients, *(curves.draw for curves in ANALYSES)]
    parts: list[Draw] = [ACCURACY.draw, over_memory, accuracy_over_time, retain_rates, LOSS.draw, *analyses]
    yield from draw_plots(group, [*parts, cost_dots, matrix_maps, confusion_maps])


def language_figures(group: Any) -> Iterator[Plot | Failed]:
    """A language model's scores after each task, and score and relative VRAM against the memory."""
    yield from draw_plots(group, [SCORE.draw, lambda series: over_memory(series, SCORES)])


def draw_plots(group: Any, parts: Iterable[Draw]) -> Iterator[Plot | Failed]:
    """Yield the plots of each of ``parts``, or a :class:`Failed` if one fails."""
    series = Series(group)
    for part in parts:
        try:
            yield from part(series)
        except Exception as error:
            yield Failed(f"a figure of {group.title}", f"{type(error).__name__}: {error}")


# ---- against memory and time -----------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """A column of the table of rows, and its names in figures. ``seconds``: a time, shown in a suitable unit."""

    slug: str
    title: str
    axis: str
    column: str
    seconds: bool = False


SECONDS = "training, s"
ACCURACIES = (
    Quantity("accuracy", "Average accuracy", "average accuracy (%)", "average"),
    Quantity("forgetting", "Forgetting", "forgetting (percentage points)", "forgetting"),
    Quantity("new-task", "Accuracy on the newest task", "newest task (%)", "newest task"),
    Quantity("time", "Training time", "training time", SECONDS, True),
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
    rows = series.rows
    sizes = rows.groupby("name")["memory"].transform("max")  # its only size, or the one beside 0
    rows = rows.loc[rows["memory"] == sizes]
    figure, axes, places = _row_axes(series, len(quantities), 1.0, 0.3)
    for ax, quantity in zip(axes, quantities):
        unit, size = _unit(quantity, series.rows)
        for name, place in places.items():
            values = list(rows.loc[rows["name"] == name, quantity.column] / size)
            style = series.styles[name]
            hollow = style["markerfacecolor"] != style["color"]
            ax.barh(
                place,
                np.mean(values),
                0.62,
                xerr=series.spread(values) or None,
                color=SURFACE if hollow else style["color"],
                edgecolor=style["color"],
                linestyle="--" if hollow else "-",
                alpha=0.85,
                error_kw={"elinewidth": 0.9},
            )
            if len(values) > 1:
                spots = place + 0.3 * (np.arange(len(values)) / (len(values) - 1) - 0.5)
                dots = {"color": SURFACE, "markeredgecolor": "#24292f", "markersize": 3.2, "markeredgewidth": 0.7}
                ax.plot(values, spots, "o", **dots)
        ax.set_xlabel(f"{quantity.axis} ({unit})" if unit else quantity.axis)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    notes = ["Each point is one seed."] if rows["name"].value_counts().max() > 1 else []
    without = [series.shown(str(name)) for name in rows.loc[rows["memory"] != memory, "name"].unique()]
    notes += [f"Without memory: {', '.join(without)}."] if without else []
    first, *others = (quantity.title for quantity in quantities)
    title = ", ".join([first, *(other[0].lower() + other[1:] for other in others)])
    where = f"{memory_text(memory)} {series.group.memory_title}"
    return Plot("bars", f"{title}: {where}", figure, series.notes(*notes, errors="error bars"))


def _against_memory(series: Series, quantity: Quantity) -> Plot:
    """A quantity against the number of exemplars, with its spread."""
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    unit, size = _unit(quantity, series.rows)
    rows = series.rows.loc[series.rows["memory"] > 0]
    for name, own in rows.groupby("name", sort=False):
        by_memory = (own[quantity.column] / size).groupby(own["memory"])
        places = [series.place(memory) for memory in by_memory.groups]
        errors = [series.spread(list(values)) for _, values in by_memory]
        look: Style = series.styles[str(name)] | {"elinewidth": 0.8}
        axes.errorbar(places, list(by_memory.mean()), errors, **look)
    _memory_axis(axes, series)
    axes.set_ylabel(f"{quantity.axis} ({unit})" if unit else quantity.axis)
    if unit:
        axes.set_ylim(bottom=0)
    legend(figure, series.styles, series.shown)
    without = ["Runs without memory are not shown."] if 0 in series.memories else []
    title = f"{quantity.title} against memory size"
    return Plot(f"{quantity.slug}-memory", title, figure, series.notes(*without, errors="error bars"))


def accuracy_over_time(series: Series) -> Iterator[Plot]:
    """The paper's first figure: one marker per memory size, whose size grows with the memory."""
    if series.rows.empty:
        return
    figure = new_figure(COLUMN, 4.2)
    axes = figure.subplots()
    unit, size = _time_unit(series.rows)
    marks = _marker_sizes(series.memories)
    times = series.rows[SECONDS] / size
    for name, style in series.styles.items():
        own = series.rows.loc[series.rows["name"] == name].groupby("memory")
        xs, ys = own[SECONDS].mean() / size, own["average"].mean()
        axes.plot(xs, ys, **style | {"marker": "", "linewidth": 1.1})
        for memory, accuracies in own["average"]:
            mark = marks[memory] * (1.4 if style["marker"] == "*" else 1)
            look: Style = style | {"markersize": mark, "linestyle": "none", "elinewidth": 0.8}
            axes.errorbar(xs[memory], ys[memory], series.spread(list(accuracies)), **look)
    if _suits_log_axis(times):
        _log_scale(axes, times)
    axes.set(xlabel=f"training time ({unit})", ylabel="average accuracy (%)")
    legend(figure, series.styles, series.shown)
    _size_legend(figure, series, marks)
    notes = series.notes(errors="error bars")
    yield Plot("accuracy-time", "Average accuracy against training time", figure, notes)


def retain_rates(series: Series) -> Iterator[Plot]:
    """Accuracy against the share of retained parameters, with and without averaging, per memory size.

    Runs that differ in further keys are lines of their own, with another marker.
    """
    group = series.group
    found: dict[Any, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in group.records:
        if RETAIN.row(record, changed_keys(record)) is not None:
            place = record.memory, not studied_value(record, "wsc.average"), group.rest(record, RETAIN.studied)
            found[place][studied_value(record, "wsc.retain")].append(record)
    lines = {place: found[place] for place in sorted(found) if len(found[place]) > 1}
    if not lines:
        return
    drawn = [record for line in lines.values() for records in line.values() for record in records]
    variant = {}
    for record, name in group.names(drawn, lambda record: record.method, RETAIN.studied).items():
        variant[group.rest(record, RETAIN.studied)] = clean(name.removeprefix("wsc"))
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    memories, styles = sorted({memory for memory, _, _ in lines}), {}
    rates = sorted({rate for line in lines.values() for rate in line})
    gaps = []
    for (memory, last, rest), line in lines.items():
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = memory_text(memory) + (" without averaging" if last else "") + variant[rest]
        face, dashes = (SURFACE, ":") if last else (colour, "-")
        marker = "osD^vPX"[list(variant).index(rest) % 7]
        styles[name] = {"color": colour, "marker": marker, "linestyle": dashes, "markerfacecolor": face}
        own = {rate: [record.average for record in line[rate]] for rate in sorted(line)}
        means, errors = list(map(np.mean, own.values())), list(map(series.spread, own.values()))
        axes.errorbar([100 * rate for rate in own], means, errors, **styles[name] | {"elinewidth": 0.8})
        if lacking := [f"{rate:.0%}" for rate in rates if rate not in line]:
            gaps.append(f"{name} at {', '.join(lacking)}")
    axes.set(xlabel="parameters that keep their weights at the reset (%)", ylabel="average accuracy (%)")
    axes.set_xlim(-3, 103)
    legend(figure, styles, title=group.memory_title)
    several = any(len(records) > 1 for line in lines.values() for records in line.values())
    notes = [f"Error bars: ± {series.options.spread_name}." if several else "One seed."]
    notes += [f"Missing: {'; '.join(gaps)}."] if gaps else []
    yield Plot("retain-rate", "WSC: average accuracy against the retain rate", figure, tuple(notes))


def cost_dots(series: Series) -> Iterator[Plot]:
    """The cost of a run in seconds, images and memory, one row per method."""
    if series.rows.empty:
        return
    figure, axes, places = _row_axes(series, 3, 1.5, 0.32)
    marks = _marker_sizes(series.memories)
    unit, size = _time_unit(series.rows)
    measures = {
        f"training time ({unit})": series.rows[SECONDS] / size,
        "training images (millions)": series.rows["training images"] / 1e6,
        "peak memory (MiB)": series.rows["peak memory, MiB"],
    }
    for ax, (title, values) in zip(axes, measures.items()):
        means = values.groupby([series.rows["name"], series.rows["memory"]]).mean()
        for name, place in places.items():
            style, own = series.styles[name], means[name]
            ax.plot(own, [place] * len(own), **style | {"marker": "", "linewidth": 1})
            for memory, mean in own.items():
                mark = marks[memory] * (1.4 if style["marker"] == "*" else 1)
                look: Style = style | {"markersize": mark}
                ax.plot([float(mean)], [place], **look)
        if _suits_log_axis(values):
            _log_scale(ax, values)
        else:
            ax.set_xlim(0, 1.08 * values.max() or 1)
        ax.set_xlabel(title)
    _size_legend(figure, series, marks)
    yield Plot("cost", "Cost of a run: seconds, images and memory", figure, series.notes())


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


def _marker_sizes(memories: Sequence[float]) -> dict[float, float]:
    return {memory: 3.5 + 7 * place / max(1, len(memories) - 1) for place, memory in enumerate(memories)}


def _size_legend(figure: Figure, series: Series, marks: Mapping[float, float]) -> None:
    if len(marks) < 2:
        return
    look: Style = {"marker": "o", "linestyle": "none", "markeredgecolor": "#8a8f94", "markerfacecolor": SURFACE}
    dots = [Line2D([], [], markersize=size, label=memory_text(memory), **look) for memory, size in marks.items()]
    title = f"marker size: {series.group.memory_title}"
    spacing = {"columnspacing": 1.3, "handletextpad": 0.2}
    figure.legend(handles=dots, loc="outside lower center", ncols=min(9, len(dots)), title=title, **spacing)


def _memory_axis(axes: Axes, series: Series) -> None:
    """Make the x axis logarithmic, with a tick at each memory size."""
    memories = [memory for memory in series.memories if memory]
    places = list(map(series.place, memories))
    axes.set_xscale("log")
    axes.set_xticks(places, list(map(memory_text, memories)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel(series.group.memory_title)
    axes.tick_params(axis="x", labelsize=8.5 if len(memories) < 6 else 7.5)


def _suits_log_axis(values: pd.Series) -> bool:
    return bool(values.min() > 0 and values.max() > 8 * values.min())


def _log_scale(axes: Axes, values: pd.Series) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5."""
    axes.set_xscale("log")
    axes.set_xlim(values.min() / 1.4, values.max() * 1.4)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _time_unit(rows: pd.DataFrame) -> tuple[str, int]:
    """(unit, seconds per unit) suited to the longest training time."""
    longest = rows[SECONDS].max()
    return ("hours", 3600) if longest >= 10 * 3600 else ("minutes", 60) if longest >= 180 else ("seconds", 1)


def _unit(quantity: Quantity, rows: pd.DataFrame) -> tuple[str, int]:
    return _time_unit(rows) if quantity.seconds else ("", 1)
