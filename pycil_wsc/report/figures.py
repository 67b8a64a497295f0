"""The figures of a report: what each shows, and the three ways to draw them. Heat maps are in ``maps``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from pycil_wsc.report import recorded
from pycil_wsc.report.groups import Group
from pycil_wsc.report.maps import confusion_maps, matrix_maps
from pycil_wsc.report.names import clean, studied_value
from pycil_wsc.report.recorded import Points
from pycil_wsc.report.rows import MEASURES, measured, memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.studies import STUDIES
from pycil_wsc.report.style import COLUMN, PAGE, SURFACE, Style, legend, new_figure, panels, wrapped
from pycil_wsc.report.tables import Failed
from pycil_wsc.report.views import rest_of
from pycil_wsc.results import Record

MARKED = 25  # points of a curve with markers
SMALLEST, LARGEST = 3.5, 10.5  # sizes of the markers of the smallest and the largest memory


def figures(group: Group, brief: bool = False) -> Iterator[Plot | Failed]:
    """Yield every :class:`Plot` for which the group has runs, drawn one at a time, or a :class:`Failed` if one fails.

    ``brief``: only the accuracies. Trials, used to choose hyperparameters, are not drawn.
    """
    if group.setting.validation_split:
        return
    over_sizes = partial(over_memory, quantities=ACCURACIES)
    parts: list[Callable[[Series], Iterable[Plot]]] = [ACCURACY.draw, over_sizes, accuracy_over_time, retain_rates]
    parts += [LOSS.draw, *(curves.draw for curves in ANALYSES), cost, matrix_maps, confusion_maps]
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


def draw_lines(
    axes: Axes, points: pd.DataFrame, styles: Mapping[str, Style], spread: str, bars: bool = True, band: bool = False
) -> None:
    """Draw a line per ``name``, through the means of ``x`` and ``y`` over the runs with the same ``at``.

    The spread of ``y``, ``se`` or ``sd``, is drawn as error bars or as a band. A single value has none. A mean over
    values of which one is no number is a gap.
    """
    for name, own in points.groupby("name", sort=False):
        style = styles[str(name)]
        runs = own.astype({"x": float, "y": float}).groupby("at")
        error = {"se": "sem", "sd": "std"}[spread]
        line = runs["y"].agg(mean="mean", error=error, known="count", all="size").assign(x=runs["x"].mean())
        line = line.where(line["known"] == line["all"]).fillna({"error": 0.0, "x": runs["x"].mean()})
        axes.errorbar(line["x"], line["mean"], line["error"] if bars else None, **style, elinewidth=0.8)
        if band:
            low, high = line["mean"] - line["error"], line["mean"] + line["error"]
            axes.fill_between(line["x"], low, high, color=style["color"], alpha=0.18, linewidth=0)


# ---- curves: a panel per memory size ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """A figure of what runs recorded: a panel per memory size, or one whose x axis is the memory size."""

    slug: str
    title: str
    axes: tuple[str, str]
    read: Callable[[Record], Points]
    notes: tuple[str, ...] = ()
    banded: bool = False  # show the spread as a band
    from_zero: bool = False

    def draw(self, series: Series) -> Iterator[Plot]:
        """The figure, if any run recorded the points."""
        rows = series.rows.assign(points=[list(self.read(record).items()) for record in series.rows["record"]])
        rows = rows.loc[rows["points"].map(bool)]
        if rows.empty:
            return
        points = rows.explode("points")
        points["x"] = points["at"] = [x for x, _ in points["points"]]
        points["y"] = [y for _, y in points["points"]]
        many = points["x"].nunique() > MARKED
        thin = {"linewidth": 1, "marker": ""} if many else {"markersize": 3.5}
        styles = {name: style | thin for name, style in series.styles.items() if name in set(rows["name"])}
        memories = sorted(points["memory"].unique())
        titles = [f"{memory_text(memory)} {series.group.memory_title}" for memory in memories]
        figure, axes = panels(titles, self.axes)
        for memory, ax in zip(memories, axes):
            own = points.loc[points["memory"] == memory]
            draw_lines(ax, own, styles, series.options.spread, bars=False, band=self.banded)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if self.from_zero:
            axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])  # shared by all panels; set after drawing
        legend(figure, styles, series.labels)
        errors = "bands" if self.banded else ""
        yield Plot(self.slug, self.title, figure, series.notes(rows, *self.notes, errors=errors))


WIDE = "Every task is one unit wide, regardless of its number of epochs."
AT_START = "At the start of each task's training."
ACCURACY = Curves(
    "curves",
    "Accuracy after each task",
    ("task", "accuracy on all classes seen (%)"),
    recorded.curve,
    banded=True,
)
SCORE = replace(ACCURACY, title="Average score after each task", axes=("task", "average score (%)"))
LOSS = Curves(
    "training-loss",
    "Training loss, mean of each epoch",
    ("tasks learned", "mean training loss (nats)"),
    recorded.losses,
    notes=(WIDE,),
    from_zero=True,
)
ANALYSES = (
    Curves(
        "gradients",
        "Similarity of the gradients of new and past data",
        ("share of new data (%)", "gradient similarity (cosine)"),
        recorded.similarity,
        notes=(AT_START,),
    ),
    Curves(
        "gradient-norm",
        "Norm of the gradients of new and past data",
        ("share of new data (%)", "mean gradient (norm relative to new data's)"),
        recorded.gradient_ratio,
        notes=(AT_START, "The paper's bound is 1."),
    ),
    Curves(
        "drift",
        "Parameter drift between tasks",
        ("task", "distance from the previous weights (norm)"),
        recorded.drift_between,
        from_zero=True,
    ),
    Curves(
        "drift-layers",
        "Parameter drift between tasks, by layer",
        ("layer, from the input", "drift (relative to the layer's previous norm)"),
        recorded.drift_of_layers,
        notes=("Mean over the tasks. Batch norm counts as a layer.",),
        from_zero=True,
    ),
    Curves(
        "drift-within",
        "Parameter drift within a task, by epoch",
        ("tasks learned", "distance moved in the epoch (norm)"),
        recorded.drift_within,
        notes=(WIDE,),
        from_zero=True,
    ),
    Curves(
        "flatness",
        "Training loss around the last solution",
        ("step (relative to the weights' norm)", "mean training loss (nats)"),
        recorded.loss_around,
        notes=("Mean over the random, filter-normalised directions.",),
    ),
    Curves(
        "dormant",
        "Dormant units after each task",
        ("task", "dormant units (%)"),
        recorded.dormant,
        from_zero=True,
    ),
)


# ---- measures over the memory size, the time and the retain rate -----------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A column of the rows, and its names in figures. ``axis``: with the series' unit of time in the place of {}."""

    slug: str
    title: str
    axis: str
    column: str
    scale: float = 1


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
COSTS = (
    TIME,
    Quantity("images", "Training images", "training images (millions)", "training images", 1e-6),
    Quantity("memory", "Peak memory", "peak memory (MiB)", "peak memory, MiB"),
)


def over_memory(series: Series, quantities: Sequence[Quantity]) -> Iterator[Plot]:
    """Each quantity against the memory size; a row per method if there is a single size."""
    sizes = [memory for memory in series.memories if memory]
    if len(sizes) < 2:
        yield from by_method(series, "methods", quantities)
        return
    rows = series.rows.loc[series.rows["memory"] > 0]
    places = rows["memory"].map(series.place)
    without = ["Runs without memory are not shown."] if 0 in series.memories else []
    for quantity in quantities:
        figure = new_figure(COLUMN, 3.5)
        axes = figure.subplots()
        points = rows.assign(at=places, x=places, y=rows[quantity.column])
        draw_lines(axes, points, series.styles, series.options.spread)
        axes.set_xscale("log")
        axes.set_xticks([series.place(size) for size in sizes], [memory_text(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel=series.group.memory_title, ylabel=quantity.axis.format(series.unit))
        legend(figure, series.styles, series.labels)
        notes = series.notes(series.rows, *without, errors="error bars")
        yield Plot(f"{quantity.slug}-memory", f"{quantity.title} against memory size", figure, notes)


def accuracy_over_time(series: Series) -> Iterator[Plot]:
    """The paper's first figure: a line per method through its memory sizes, from the smallest to the largest."""
    if series.rows.empty:
        return
    figure = new_figure(COLUMN, 4.2)
    axes = figure.subplots()
    rows = series.rows
    draw_lines(
        axes, rows.assign(at=rows["memory"], x=rows["time"], y=rows["average"]), series.styles, series.options.spread
    )
    _log_scale(axes, rows["time"])
    axes.set(xlabel=TIME.axis.format(series.unit), ylabel="average accuracy (%)")
    legend(figure, series.styles, series.labels)
    note = _sizes(series, "A line joins the memory sizes in their order: ")
    notes = series.notes(rows, note, errors="error bars")
    yield Plot("accuracy-time", "Average accuracy against training time", figure, notes)


def retain_rates(series: Series) -> Iterator[Plot]:
    """Accuracy against the share of retained parameters, with and without averaging, per memory size.

    Runs that differ in further keys are lines of their own, with another marker.
    """
    group = series.group
    retained = next(study for study in STUDIES if study.slug == "retain-rate")
    rows = retained.rows_of(group)
    rows = rows.assign(
        x=[100 * float(studied_value(record, "wsc.retain")) for record in rows["record"]],
        last=[not studied_value(record, "wsc.average") for record in rows["record"]],
        rest=rest_of(rows, retained.studied or ()),
        average=measured(rows, MEASURES["accuracy"][0]),
    )
    line_of = ["memory", "last", "rest"]
    rows = rows.loc[rows.groupby(line_of)["x"].transform("nunique") > 1]
    if rows.empty:
        return
    rows = group.named(rows, "variant", "learner", retained.studied or ())
    rows["variant"] = [clean(name.removeprefix("wsc")) for name in rows["variant"]]
    memories, variants = sorted(rows["memory"].unique()), list(rows["variant"].unique())
    styles: dict[str, Style] = {}
    for (memory, last, _), own in rows.groupby(line_of):
        variant = own["variant"].iloc[0]
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = memory_text(memory) + (" without averaging" if last else "") + variant
        rows.loc[own.index, "name"] = name
        styles[name] = {
            "color": colour,
            "marker": "osD^vPX"[variants.index(variant) % 7],
            "linestyle": ":" if last else "-",
            "markerfacecolor": SURFACE if last else colour,
        }
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    rows = rows.assign(at=rows["x"], y=rows["average"]).sort_values(line_of[:2], kind="stable")
    draw_lines(axes, rows, styles, series.options.spread)
    axes.set(xlabel="parameters that keep their weights at the reset (%)", ylabel="average accuracy (%)")
    legend(figure, styles, {}, title=group.memory_title)
    several = rows.groupby([*line_of, "x"]).size().max() > 1
    note = f"Error bars: ± {series.options.spread_name}." if several else "One seed."
    yield Plot("retain-rate", "WSC: average accuracy against the retain rate", figure, (note,))


# ---- a row per method ------------------------------------------------------------------------------------------------


def cost(series: Series) -> Iterator[Plot]:
    return by_method(series, "cost", COSTS)


def by_method(series: Series, slug: str, quantities: Sequence[Quantity]) -> Iterator[Plot]:
    """A row per method and a panel per quantity, with a marker per memory size and the spread over the seeds."""
    rows = series.rows
    if rows.empty:
        return
    names = list(series.styles)[::-1]
    labels = [wrapped(series.labels[name], 34) for name in names]
    figure = new_figure(PAGE, 1.2 + 0.3 * sum(1 + 0.55 * label.count("\n") for label in labels))
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    error = {"se": "sem", "sd": "std"}[series.options.spread]
    last = max(1, len(series.memories) - 1)
    for ax, quantity in zip(panels, quantities):
        values = quantity.scale * rows[quantity.column].astype(float)
        found = values.groupby([rows["name"], rows["memory"]]).agg(["mean", error]).fillna({error: 0.0})
        for (name, memory), (mean, width) in zip(found.index, found.to_numpy()):
            size = SMALLEST + (LARGEST - SMALLEST) * series.memories.index(memory) / last
            style = series.styles[name] | {"markersize": size, "linestyle": "none"}
            ax.errorbar(mean, names.index(name), xerr=width, **style, elinewidth=0.8)
        if not _log_scale(ax, values):
            ax.set_xlim(min(0, 1.08 * values.min()), 1.08 * values.max() or 1)
        ax.set_xlabel(quantity.axis.format(series.unit))
    panels[0].set_yticks(range(len(names)), labels)
    panels[0].set_ylim(-0.6, len(names) - 0.4)
    note = _sizes(series, "The larger the marker, the larger the memory: ")
    first, *others = (quantity.title for quantity in quantities)
    title = ", ".join([first, *(other[0].lower() + other[1:] for other in others)])
    yield Plot(slug, title, figure, series.notes(rows, note, errors="error bars"))


def _sizes(series: Series, several: str) -> str:
    """A note on the memory sizes of a figure, which begins with ``several`` if there are several."""
    sizes = ", ".join(map(memory_text, series.memories))
    return f"{several if len(series.memories) > 1 else ''}{sizes} {series.group.memory_title}."


def _log_scale(axes: Axes, values: pd.Series) -> bool:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5, if the values suit it."""
    if values.min() <= 0 or values.max() <= 8 * values.min():
        return False
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return True
