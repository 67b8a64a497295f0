"""The figures of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
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


def language_figures(group: Any) -> Iterator[Plot | Failed]:
    """A language model's scores after each task, and score and relative VRAM against the memory."""
    yield from draw_plots(group, [SCORE.draw, scores_over_memory])


def figures(group: Group, brief: bool = False) -> Iterator[Plot | Failed]:
    """Yield every :class:`Plot` for which the group has runs, drawn one at a time.

    A figure that fails does not affect the others. ``brief``: only the accuracies.
    """
    if group.setting.validation_split:
        return  # trials, used to choose hyperparameters, are not drawn
    if brief:
        yield from draw_plots(group, [ACCURACY.draw, average_over_memory])
        return
    analyses = [gradients, *(curves.draw for curves in ANALYSES)]
    parts = [ACCURACY.draw, over_memory, accuracy_over_time, retain_rates, LOSS.draw, *analyses, cost_dots]
    yield from draw_plots(group, [*parts, matrix_maps, confusion_maps])


def draw_plots(group: Any, parts: Iterable[Callable[[Series], Iterable[Plot]]]) -> Iterator[Plot | Failed]:
    """Yield the plots of each of ``parts``, or a :class:`Failed` if one fails."""
    series = Series(group)
    for part in parts:
        try:
            yield from part(series)
        except Exception as error:
            name = getattr(part, "__name__", "a figure").replace("_", " ")
            yield Failed(f"{name} of {group.title}", f"{type(error).__name__}: {error}")


# ---- accuracy, time and memory ---------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """A value of each run, and its names in figures. ``seconds``: a time, shown in a suitable unit."""

    slug: str
    title: str
    axis: str
    read: Callable[[Record], float]
    seconds: bool = False


def average(record: Record) -> float:
    return record.average


def seconds(record: Record) -> float:
    return record.data["train_seconds"]


TIME = Quantity("time", "Training time", "training time", seconds, True)
ACCURACIES = (
    Quantity("accuracy", "Average accuracy", "average accuracy (%)", average),
    Quantity("forgetting", "Forgetting", "forgetting (percentage points)", lambda record: record.data["forgetting"]),
    Quantity("new-task", "Accuracy on the newest task", "newest task (%)", lambda record: record.data["new_acc"]),
    TIME,
)
SCORES = (
    Quantity("score", "Average score", "average score (%)", average),
    Quantity(
        "vram",
        "Relative VRAM usage",
        "relative VRAM usage (minutes x models)",
        lambda record: record.data["relative_vram_minutes"],
    ),
)


def over_memory(series: Series, quantities: Sequence[Quantity] = ACCURACIES) -> Iterator[Plot]:
    """Each quantity against the memory size; bars of all quantities if there is a single size."""
    sizes = [memory for memory in series.memories if memory]
    if len(sizes) > 1:
        for quantity in quantities:
            yield against_memory(series, quantity)
    elif series.memories:
        yield bars(series, quantities, series.memories[-1])


def average_over_memory(series: Series) -> Iterator[Plot]:
    """Only the average accuracy."""
    yield from over_memory(series, ACCURACIES[:1])


def scores_over_memory(series: Series) -> Iterator[Plot]:
    """:func:`over_memory` for language models."""
    yield from over_memory(series, SCORES)


def bars(series: Series, quantities: Sequence[Quantity], memory: float) -> Plot:
    """A bar per method at one memory size, with a point per seed; methods without memory are included."""
    shown = {name: found.get(memory) or found[0] for name in series.styles if (found := series.of(name))}
    names = list(shown)[::-1]
    labels = [wrapped(series.shown(name), 34) for name in names]
    heights = np.array([1 + 0.55 * label.count("\n") for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = new_figure(PAGE, 1.0 + 0.3 * heights.sum())
    axes = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for ax, quantity in zip(axes, quantities):
        unit, size = _unit(quantity, series.records)
        for place, name in zip(places, names):
            values, style = [quantity.read(record) / size for record in shown[name]], series.styles[name]
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
                ax.plot(
                    values, spots, "o", color=SURFACE, markeredgecolor="#24292f", markersize=3.2, markeredgewidth=0.7
                )
        ax.set_xlabel(f"{quantity.axis} ({unit})" if unit else quantity.axis)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(places, labels)
    axes[0].set_ylim(0, heights.sum())
    notes = ["Each point is one seed."] if max(map(len, shown.values())) > 1 else []
    without = [series.shown(name) for name, records in shown.items() if records[0].memory != memory]
    notes += [f"Without memory: {', '.join(without)}."] if without else []
    first, *others = (quantity.title for quantity in quantities)
    title = ", ".join([first, *(other[0].lower() + other[1:] for other in others)])
    return Plot(
        "bars",
        f"{title}: {memory_text(memory)} {series.group.memory_title}",
        figure,
        series.notes(*notes, errors="error bars"),
    )


def against_memory(series: Series, quantity: Quantity) -> Plot:
    """A quantity against the number of exemplars, with its spread."""
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    unit, size = _unit(quantity, series.records)
    shown = {name: style for name, style in series.styles.items() if any(series.of(name))}
    for name, style in shown.items():
        values = {
            memory: [quantity.read(record) / size for record in records]
            for memory, records in series.of(name).items()
            if memory
        }
        means = [float(np.mean(line)) for line in values.values()]
        look: Style = style | {"elinewidth": 0.8}
        axes.errorbar(list(map(series.place, values)), means, list(map(series.spread, values.values())), **look)
    memory_axis(axes, series)
    axes.set_ylabel(f"{quantity.axis} ({unit})" if unit else quantity.axis)
    if unit:
        axes.set_ylim(bottom=0)
    legend(figure, shown, series.shown)
    without = ["Runs without memory are not shown."] if 0 in series.memories else []
    return Plot(
        f"{quantity.slug}-memory",
        f"{quantity.title} against memory size",
        figure,
        series.notes(*without, errors="error bars"),
    )


def accuracy_over_time(series: Series) -> Iterator[Plot]:
    """The paper's first figure: one marker per memory size, whose size grows with the memory."""
    if not series.records:
        return
    figure = new_figure(COLUMN, 4.2)
    axes = figure.subplots()
    unit, size = time_unit(series.records)
    marks = marker_sizes(series.memories)
    for name, style in series.styles.items():
        points = {
            memory: (np.mean([seconds(r) / size for r in records]), np.mean(values), series.spread(values))
            for memory, records in series.of(name).items()
            if (values := list(map(average, records)))
        }
        times, accuracies, errors = zip(*points.values())
        axes.plot(times, accuracies, **style | {"marker": "", "linewidth": 1.1})
        for memory, time, accuracy, error in zip(points, times, accuracies, errors):
            mark = marks[memory] * (1.4 if style["marker"] == "*" else 1)
            axes.errorbar(time, accuracy, error, **style | {"markersize": mark, "linestyle": "none", "elinewidth": 0.8})
    if suits_log_axis(times := [seconds(record) / size for record in series.records]):
        log_scale(axes, times)
    axes.set(xlabel=f"training time ({unit})", ylabel="average accuracy (%)")
    legend(figure, series.styles, series.shown)
    size_legend(figure, series, marks)
    yield Plot("accuracy-time", "Average accuracy against training time", figure, series.notes(errors="error bars"))


def retain_rates(series: Series) -> Iterator[Plot]:
    """Accuracy against the share of retained parameters, with and without averaging, per memory size.

    Runs that differ in further keys are lines of their own, with another marker.
    """
    group, found = series.group, {}
    for record in group.records:
        if RETAIN.row(record, changed_keys(record)) is not None:
            place = record.memory, not studied_value(record, "wsc.average"), group.rest(record, RETAIN.studied)
            found.setdefault(place, {}).setdefault(studied_value(record, "wsc.retain"), []).append(record)
    lines = {place: line for place, line in sorted(found.items()) if len(line) > 1}
    if not lines:
        return
    drawn = [record for line in lines.values() for records in line.values() for record in records]
    variant = {
        group.rest(record, RETAIN.studied): clean(name.removeprefix("wsc"))
        for record, name in group.names(drawn, lambda record: record.method, RETAIN.studied).items()
    }
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    memories, styles = sorted({memory for memory, _, _ in lines}), {}
    for (memory, last, rest), line in lines.items():
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = memory_text(memory) + (" without averaging" if last else "") + variant[rest]
        face = SURFACE if last else colour
        marker = "osD^vPX"[list(variant).index(rest) % 7]
        styles[name] = {"color": colour, "marker": marker, "linestyle": ":" if last else "-", "markerfacecolor": face}
        rates = sorted(line)
        values = [list(map(average, line[rate])) for rate in rates]
        means, errors = list(map(np.mean, values)), list(map(series.spread, values))
        axes.errorbar([100 * rate for rate in rates], means, errors, **styles[name] | {"elinewidth": 0.8})
    axes.set(
        xlabel="parameters that keep their weights at the reset (%)", ylabel="average accuracy (%)", xlim=(-3, 103)
    )
    legend(figure, styles, title=group.memory_title)
    rates = sorted({rate for line in lines.values() for rate in line})
    gaps = [
        f"{name} at {', '.join(f'{rate:.0%}' for rate in rates if rate not in line)}"
        for name, line in zip(styles, lines.values())
        if len(line) < len(rates)
    ]
    several = any(len(records) > 1 for line in lines.values() for records in line.values())
    notes = [f"Error bars: ± {series.options.spread_name}." if several else "One seed."]
    notes += [f"Missing: {'; '.join(gaps)}."] if gaps else []
    yield Plot("retain-rate", "WSC: average accuracy against the retain rate", figure, tuple(notes))


def cost_dots(series: Series) -> Iterator[Plot]:
    """The cost of a run in seconds, images and memory, one row per method."""
    if not series.records:
        return
    names = list(series.styles)[::-1]
    labels = [wrapped(series.shown(name), 34) for name in names]
    heights = np.array([1 + 0.5 * label.count("\n") for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = new_figure(PAGE, 1.5 + 0.32 * heights.sum())
    marks = marker_sizes(series.memories)
    unit, size = time_unit(series.records)
    measures = {
        f"training time ({unit})": lambda record: seconds(record) / size,
        "training images (millions)": lambda record: record.data["images_trained"] / 1e6,
        "peak memory (MiB)": lambda record: record.data["peak_memory_bytes"] / 2**20,
    }
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (title, read) in zip(axes, measures.items()):
        for place, name in zip(places, names):
            style = series.styles[name]
            points = {memory: np.mean(list(map(read, records))) for memory, records in series.of(name).items()}
            ax.plot(list(points.values()), [place] * len(points), **style | {"marker": "", "linewidth": 1})
            for memory, value in points.items():
                mark = marks[memory] * (1.4 if style["marker"] == "*" else 1)
                ax.plot(value, place, **style | {"markersize": mark})
        values = [read(record) for record in series.records]
        if suits_log_axis(values):
            log_scale(ax, values)
        else:
            ax.set_xlim(0, 1.08 * max(values) or 1)
        ax.set(xlabel=title, ylim=(0, heights.sum()))
    axes[0].set_yticks(places, labels)
    size_legend(figure, series, marks)
    yield Plot("cost", "Cost of a run: seconds, images and memory", figure, series.notes())


# ---- axes and legends ------------------------------------------------------------------------------------------------


def marker_sizes(memories: Sequence[float]) -> dict[float, float]:
    return {memory: 3.5 + 7 * place / max(1, len(memories) - 1) for place, memory in enumerate(memories)}


def size_legend(figure: Figure, series: Series, marks: dict[float, float]) -> None:
    if len(marks) < 2:
        return
    dots = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="none",
            markeredgecolor="#8a8f94",
            markerfacecolor=SURFACE,
            markersize=size,
            label=memory_text(memory),
        )
        for memory, size in marks.items()
    ]
    figure.legend(
        handles=dots,
        loc="outside lower center",
        ncols=min(9, len(dots)),
        title=f"marker size: {series.group.memory_title}",
        columnspacing=1.3,
        handletextpad=0.2,
    )


def memory_axis(axes: Axes, series: Series) -> None:
    """Make the x axis logarithmic, with a tick at each memory size."""
    memories = [memory for memory in series.memories if memory]
    places = list(map(series.place, memories))
    axes.set_xscale("log")
    axes.set_xticks(places, list(map(memory_text, memories)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel(series.group.memory_title)
    axes.tick_params(axis="x", labelsize=8.5 if len(memories) < 6 else 7.5)


def suits_log_axis(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis suits the values."""
    return min(values) > 0 and max(values) > 8 * min(values)


def log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5."""
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.4, max(values) * 1.4)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def time_unit(records: Sequence[Record]) -> tuple[str, int]:
    """(unit, seconds per unit) suited to the longest training time."""
    longest = max(map(seconds, records))
    return ("hours", 3600) if longest >= 10 * 3600 else ("minutes", 60) if longest >= 180 else ("seconds", 1)


def _unit(quantity: Quantity, records: Sequence[Record]) -> tuple[str, int]:
    return time_unit(records) if quantity.seconds else ("", 1)
