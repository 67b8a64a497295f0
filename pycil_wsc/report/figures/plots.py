"""The figures of a report, as views of the rows: ``figures.json`` declares them. Heat maps are in ``maps``."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from pycil_wsc.errors import one_line
from pycil_wsc.report.figures.curves import CURVES
from pycil_wsc.report.figures.heat_maps import confusion_maps, matrix_maps
from pycil_wsc.report.figures.series import SPECS, Plot, Series, Spec
from pycil_wsc.report.figures.style import PAGE, SURFACE, Style, legend, panels, wrapped
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import AVERAGE, measured, memory_text
from pycil_wsc.report.studies import STUDIES, WITHOUT
from pycil_wsc.report.tables.builders import rest_of
from pycil_wsc.results import ALL

MARKED = 25  # points of a curve with markers
SMALLEST = 3.5  # size of the markers of the smallest memory
LARGEST = 10.5  # and of the largest
ACCURACY, *_, TIME = SPECS["accuracies"]


def figures(group: Group) -> Iterator[Plot]:
    """Yield every :class:`Plot` for which the group has runs, drawn one at a time.

    Trials, used to choose hyperparameters, are not drawn.
    """
    if group.setting.validation_split:
        return
    accuracy, *curves = [partial(draw_curve, spec=spec) for spec in SPECS["curves"]]
    over_sizes = partial(over_memory, specs=SPECS["accuracies"])
    cost = partial(by_method, slug="cost", specs=SPECS["costs"])
    parts: list[Callable[[Series], Iterable[Plot]]]
    parts = [accuracy, over_sizes, accuracy_over_time, retain_rates, *curves, cost, matrix_maps, confusion_maps]
    if group.tasks:
        (score,) = SPECS["curves of language models"]
        parts = [partial(draw_curve, spec=score), partial(over_memory, specs=SPECS["scores"])]
    series = Series(group)
    if series.rows.empty:  # all runs belong to studies
        parts = [part for part in parts if part is retain_rates]
    for part in parts:
        with group.attempt("a figure"):
            yield from part(series)


def draw_lines(
    axes: Axes, points: pd.DataFrame, styles: Mapping[str, Style], spread: str, bars: bool = True, band: bool = False
) -> None:
    """Draw a line per ``name``, through the means of ``x`` and ``y`` over the runs with the same ``at``.

    The spread of ``y``, ``sem`` or ``std``, is drawn as error bars or as a band. A single value has none. If one of
    the values is not a number, the line has a gap.
    """
    for name, of_line in points.groupby("name", sort=False):
        style = styles[str(name)]
        runs = of_line.astype({"x": float, "y": float}).groupby("at")
        line = runs["y"].agg(mean="mean", error=spread, known="count", all="size").assign(x=runs["x"].mean())
        line = line.where(line["known"] == line["all"]).fillna({"error": 0.0, "x": runs["x"].mean()})
        axes.errorbar(line["x"], line["mean"], line["error"] if bars else None, **style, elinewidth=0.8)
        if band:
            low = line["mean"] - line["error"]
            high = line["mean"] + line["error"]
            axes.fill_between(line["x"], low, high, color=style["color"], alpha=0.18, linewidth=0)


def draw_curve(series: Series, spec: Spec) -> Iterator[Plot]:
    """What runs recorded, with a panel per memory size; nothing if no run recorded it."""
    read = CURVES[spec.slug]
    rows = series.rows.assign(points=[list(read(record).items()) for record in series.rows["record"]])
    rows = rows.loc[rows["points"].map(bool)]
    if rows.empty:
        return
    points = rows.explode("points")
    points["x"] = [x for x, _ in points["points"]]
    points["at"] = points.groupby(["name", "memory", "seed"])["x"].rank() if spec.in_order else points["x"]
    points["y"] = [y for _, y in points["points"]]
    # a mean is over the same seeds everywhere: those of a budget in seconds have different numbers of epochs
    seeds = points.groupby(["name", "memory"])["seed"].transform("nunique")
    points = points.loc[points.groupby(["name", "memory", "at"])["seed"].transform("nunique") == seeds]
    thin = {"linewidth": 1, "marker": ""} if points["x"].nunique() > MARKED else {"markersize": 3.5}
    styles = {name: style | thin for name, style in series.styles.items() if name in set(rows["name"])}
    memories = sorted(points["memory"].unique())
    titles = [f"{memory_text(memory)} {series.group.memory_title}" for memory in memories]
    figure, axes = panels(titles, spec.axes)
    for memory, ax in zip(memories, axes):
        draw_lines(ax, points.loc[points["memory"] == memory], styles, series.spread, bars=False, band=spec.banded)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if spec.from_zero:
        axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])  # shared by all panels; set after drawing
    legend(figure, styles, series.labels)
    notes = series.notes(rows, *spec.notes, errors="bands" if spec.banded else "")
    yield Plot(spec.slug, spec.title, figure, notes)


def over_memory(series: Series, specs: Sequence[Spec]) -> Iterator[Plot]:
    """Each measure against the memory size; a row per method if there is a single size.

    A memory of all images is drawn at twice the largest number.
    """
    sizes = [memory for memory in series.memories if memory]
    if len(sizes) < 2:
        yield from by_method(series, "methods", specs)
        return
    rows = series.rows.loc[series.rows["memory"] > 0]
    places = {size: size if size != ALL else 2 * sizes[-2] for size in sizes}  # on the axis
    at = rows["memory"].map(places)
    without = ["Runs without memory are not shown."] if 0 in series.memories else []
    notes = series.notes(series.rows, *without, errors="error bars")
    for spec in specs:
        figure, (ax,) = panels([""], (series.group.memory_title, series.axis(spec)), height=3.2)
        draw_lines(ax, rows.assign(at=at, x=at, y=rows[spec.column]), series.styles, series.spread)
        ax.set_xscale("log")
        ax.set_xticks(list(places.values()), [memory_text(size) for size in sizes])
        ax.xaxis.set_minor_locator(NullLocator())
        legend(figure, series.styles, series.labels)
        yield Plot(f"{spec.slug}-memory", f"{spec.title} against memory size", figure, notes)


def accuracy_over_time(series: Series) -> Iterator[Plot]:
    """The paper's first figure: a line per method through its memory sizes, from the smallest to the largest."""
    rows = series.rows
    figure, (ax,) = panels([""], (series.axis(TIME), series.axis(ACCURACY)), height=3.9)
    draw_lines(ax, rows.assign(at=rows["memory"], x=rows["time"], y=rows["average"]), series.styles, series.spread)
    _log_scale(ax, rows["time"])
    legend(figure, series.styles, series.labels)
    notes = series.notes(rows, series.sizes("A line joins the memory sizes in their order: "), errors="error bars")
    yield Plot("accuracy-time", "Average accuracy against training time", figure, notes)


def retain_rates(series: Series) -> Iterator[Plot]:
    """Accuracy against the fraction of retained parameters, with and without averaging, per memory size.

    Runs that differ in further keys are lines of their own, with another marker.
    """
    group = series.group
    (study,) = (study for study in STUDIES if study.slug == "retain-rate")
    rows = group.rows_in(study)
    rates = [100 * float(record.studied(study.corner)) for record in rows["record"]]
    rows = rows.assign(x=rates, at=rates, y=measured(rows, AVERAGE), rest=rest_of(rows, study.studied))
    rows["last"] = rows["entry"].str.endswith(WITHOUT)
    line_of = ["memory", "last", "rest"]
    rows = rows.groupby(line_of).filter(lambda line: line["x"].nunique() > 1)
    if rows.empty:
        return
    rows = group.named(rows, "variant", "learner", study.studied).sort_values(line_of[:2], kind="stable")
    memories = sorted(rows["memory"].unique())
    variants = list(rows["variant"].unique())
    styles: dict[str, Style] = {}
    for _, of_line in rows.groupby(line_of):
        memory, last, variant = of_line[["memory", "last", "variant"]].iloc[0]
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = memory_text(memory) + (WITHOUT if last else "") + one_line(variant.removeprefix("wsc"))
        rows.loc[of_line.index, "name"] = name
        marker = "osD^vPX"[variants.index(variant) % 7]
        styles[name] = {"color": colour, "marker": marker, "linestyle": ":" if last else "-"}
        styles[name]["markerfacecolor"] = SURFACE if last else colour
    labels = "parameters that keep their weights at the reset (%)", series.axis(ACCURACY)
    figure, (ax,) = panels([""], labels, height=3.2)
    draw_lines(ax, rows, styles, series.spread)
    legend(figure, styles, {}, group.memory_title)
    note = f"Error bars: ± {group.options.spread_name}." if rows.duplicated([*line_of, "x"]).any() else "One seed."
    yield Plot("retain-rate", "WSC: average accuracy against the retain rate", figure, [note])


def by_method(series: Series, slug: str, specs: Sequence[Spec]) -> Iterator[Plot]:
    """A row per method and a panel per measure, with a marker per memory size and the spread over the seeds."""
    rows = series.rows
    names = list(series.styles)[::-1]
    labels = [wrapped(series.labels[name], 22) for name in names]
    figure = Figure((PAGE, 1.2 + 0.3 * sum(1 + 0.55 * label.count("\n") for label in labels)))
    axes = figure.subplots(1, len(specs), sharey=True, squeeze=False)[0]
    last = max(1, len(series.memories) - 1)
    for ax, spec in zip(axes, specs):
        values = spec.scale * rows[spec.column]
        summary = values.groupby([rows["name"], rows["memory"]]).agg(mean="mean", error=series.spread)
        for (name, memory), mean, error in summary.fillna({"error": 0.0}).itertuples():
            size = SMALLEST + (LARGEST - SMALLEST) * series.memories.index(memory) / last
            style = series.styles[name] | {"markersize": size, "linestyle": "none"}
            ax.errorbar(mean, names.index(name), xerr=error, **style, elinewidth=0.8)
        if not _log_scale(ax, values):
            ax.set_xlim(min(0, 1.08 * values.min()), 1.08 * values.max() or 1)
        ax.set_xlabel(series.axis(spec))
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].set_ylim(-0.6, len(names) - 0.4)
    note = series.sizes("The larger the marker, the larger the memory: ")
    title = ", ".join([specs[0].title, *(spec.title[0].lower() + spec.title[1:] for spec in specs[1:])])
    yield Plot(slug, title, figure, series.notes(rows, note, errors="error bars"))


def _log_scale(axes: Axes, values: pd.Series) -> bool:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5, if the values suit it."""
    if values.min() <= 0 or values.max() <= 8 * values.min():
        return False
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return True
