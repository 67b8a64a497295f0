"""Which figures there are, and what of the runs they show."""

import numpy as np
from matplotlib import colormaps
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from pycil_wsc.report.analyses import analyses
from pycil_wsc.report.curves import concatenated, curves, mean_series
from pycil_wsc.report.groups import position, unusual
from pycil_wsc.report.maps import confusion_maps, matrix_maps
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.studies import retain_row
from pycil_wsc.report.style import COLUMN, PAGE, SURFACE, key, new_figure
from pycil_wsc.report.tables import mean_and_error


def figures(group):
    """Every :class:`Plot` that the runs of a group fill, even in part; drawn one at a time."""
    if group.setting.validation_split:
        return  # to choose by, not to show
    series = Series(group)
    if series.records:
        yield accuracy_over_time(series)
        if any(series.memories):
            yield from (against_memory(series, *measure) for measure in AGAINST_MEMORY)
    yield from retain_rates(group)
    if series.records:
        yield from accuracy_curves(series)
        yield from loss_curves(series)
        yield from analyses(series)
        yield cost_dots(series)
        yield from matrix_maps(series)
        yield from confusion_maps(series)


# ---- accuracy, time and memory -----------------------------------------------------------------------------------------


def average(record):
    return record.data["avg_acc"]


def seconds(record):
    return record.data["train_seconds"]


AGAINST_MEMORY = (
    ("accuracy-memory", "Average accuracy against memory size", "average accuracy (%)", average),
    (
        "forgetting-memory",
        "Forgetting against memory size",
        "forgetting (percentage points)",
        lambda record: record.data["forgetting"],
    ),
    (
        "new-task-memory",
        "Accuracy on the newest task against memory size",
        "accuracy on the newest task (%)",
        lambda record: record.data["new_acc"],
    ),
    ("time-memory", "Training time against memory size", "training time", seconds),
)


def accuracy_over_time(series):
    """The paper's first figure: a marker for each memory size, larger for a larger one."""
    figure = new_figure(COLUMN, 4.2)
    axes = figure.subplots()
    unit, size = time_unit(series.records)
    marks = marker_sizes(series.memories)
    for name, style in series.styles.items():
        points = {
            memory: (
                mean_and_error([seconds(r) / size for r in records])[0],
                *mean_and_error(list(map(average, records))),
            )
            for memory, records in series.of(name).items()
        }
        times, accuracies, errors = zip(*points.values())
        axes.plot(times, accuracies, **style | {"marker": "", "linewidth": 1.1})
        for memory, time, accuracy, error in zip(points, times, accuracies, errors):
            axes.errorbar(
                time,
                accuracy,
                error,
                **style
                | {
                    "markersize": marks[memory] * (1.4 if style["marker"] == "*" else 1),
                    "linestyle": "none",
                    "elinewidth": 0.8,
                },
            )
    if spread(times := [seconds(record) / size for record in series.records]):
        log_scale(axes, times)
    axes.set(xlabel=f"training time ({unit})", ylabel="average accuracy (%)")
    key(figure, series.styles)
    size_key(figure, series, marks)
    return Plot("accuracy-time", "Average accuracy against training time", figure, series.notes(errors=True))


def against_memory(series, slug, title, axis, read):
    """A measure over the number of exemplars, with standard errors."""
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    unit, size = time_unit(series.records) if read is seconds else ("", 1)
    shown = {name: style for name, style in series.styles.items() if any(series.of(name))}
    for name, style in shown.items():
        values = {
            memory: [read(record) / size for record in records] for memory, records in series.of(name).items() if memory
        }
        means, errors = zip(*map(mean_and_error, values.values()))
        axes.errorbar(list(values), means, [error or 0 for error in errors], **style | {"elinewidth": 0.8})
    memory_axis(axes, [memory for memory in series.memories if memory], series.group.memory_title)
    axes.set_ylabel(f"{axis} ({unit})" if unit else axis)
    if unit:
        axes.set_ylim(bottom=0)
    key(figure, shown)
    without = ["Runs without memory have no place on this axis."] if 0 in series.memories else []
    return Plot(slug, title, figure, series.notes(*without, errors=True))


def retain_rates(group):
    """Accuracy over the share of parameters that keep their weights: a line per memory size, with averaging and without."""
    lines = {}
    for record in group.records:
        if record.memory and retain_row(record, unusual(record)) is not None:
            line = lines.setdefault((record.memory, not position(record, "wsc.average")), {})
            line.setdefault(position(record, "wsc.retain"), []).append(average(record))
    lines = {key: line for key, line in lines.items() if len(line) > 1}
    if not lines:
        return
    figure = new_figure(COLUMN, 3.5)
    axes = figure.subplots()
    memories = sorted({memory for memory, _ in lines})
    styles = {}
    for (memory, last), line in sorted(lines.items()):
        colour = colormaps["viridis"](0.25 + 0.55 * memories.index(memory) / max(1, len(memories) - 1))
        name = f"{memory:,}" + (" without averaging" if last else "")
        styles[name] = {
            "color": colour,
            "marker": "o",
            "linestyle": ":" if last else "-",
            "markerfacecolor": SURFACE if last else colour,
        }
        rates = sorted(line)
        means, errors = zip(*(mean_and_error(line[rate]) for rate in rates))
        axes.errorbar(
            [100 * rate for rate in rates],
            means,
            [error or 0 for error in errors],
            **styles[name] | {"elinewidth": 0.8},
        )
    axes.set(
        xlabel="parameters that keep their weights at the reset (%)", ylabel="average accuracy (%)", xlim=(-3, 103)
    )
    key(figure, styles, title=group.memory_title)
    rates = sorted({rate for line in lines.values() for rate in line})
    gaps = [
        f"{name} at {', '.join(f'{rate:.0%}' for rate in rates if rate not in line)}"
        for name, (_, line) in zip(styles, sorted(lines.items()))
        if len(line) < len(rates)
    ]
    bars = (
        ["Bars: one standard error."]
        if any(len(values) > 1 for line in lines.values() for values in line.values())
        else ["One seed."]
    )
    notes = [*bars, *([f"Missing: {'; '.join(gaps)}."] if gaps else [])]
    yield Plot("retain-rate", "WSC: average accuracy over the retain rate", figure, tuple(notes))


# ---- over the tasks ----------------------------------------------------------------------------------------------------


def accuracy_curves(series):
    """Accuracy on all classes seen so far."""

    def curve(records):
        means = mean_series([record.data["curve"] for record in records])
        return range(1, len(means) + 1), means

    yield from curves(
        series,
        "curves",
        "Accuracy after each task",
        average,
        curve,
        ("task", "accuracy on all classes seen (%)"),
        markers=True,
    )


def loss_curves(series):
    """Mean training loss of each epoch."""
    yield from curves(
        series,
        "training-loss",
        "Training loss, mean of each epoch",
        training_loss,
        lambda records: concatenated([mean_series(losses) for losses in zip(*map(training_loss, records))]),
        ("tasks learned", "mean training loss (nats)"),
        ("Every task is one unit wide, however many epochs it has.",),
        from_zero=True,
    )


def training_loss(record):
    return record.data.get("train_loss")


def cost_dots(series):
    """A row per method: what a run costs in seconds, images and memory."""
    names = list(series.styles)[::-1]
    figure = new_figure(PAGE, 1.5 + 0.32 * len(names))
    marks = marker_sizes(series.memories)
    unit, size = time_unit(series.records)
    measures = {
        f"training time ({unit})": lambda record: seconds(record) / size,
        "training images (millions)": lambda record: record.data["images_trained"] / 1e6,
        "peak memory (MiB)": lambda record: record.data["peak_memory_bytes"] / 2**20,
    }
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (title, read) in zip(axes, measures.items()):
        for row, name in enumerate(names):
            style = series.styles[name]
            points = {memory: np.mean(list(map(read, records))) for memory, records in series.of(name).items()}
            ax.plot(list(points.values()), [row] * len(points), **style | {"marker": "", "linewidth": 1})
            for memory, value in points.items():
                ax.plot(value, row, **style | {"markersize": marks[memory] * (1.4 if style["marker"] == "*" else 1)})
        values = [read(record) for record in series.records]
        if spread(values):
            log_scale(ax, values)
        else:
            ax.set_xlim(0, 1.08 * max(values))
        ax.set(xlabel=title, ylim=(-0.7, len(names) - 0.3))
    axes[0].set_yticks(range(len(names)), names)
    size_key(figure, series, marks)
    return Plot("cost", "What a run costs: seconds, images and memory", figure, series.notes())


# ---- axes and keys -----------------------------------------------------------------------------------------------------


def marker_sizes(memories):
    return {memory: 3.5 + 7 * place / max(1, len(memories) - 1) for place, memory in enumerate(memories)}


def size_key(figure, series, marks):
    dots = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="none",
            markeredgecolor="#8a8f94",
            markerfacecolor=SURFACE,
            markersize=size,
            label=f"{memory:,}",
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


def memory_axis(axes, memories, title):
    """Logarithmic, with a tick at each size."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(memories))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(memories[0] / 1.3, memories[-1] * 1.3)
    axes.set_xlabel(title)
    axes.tick_params(axis="x", labelsize=8.5 if len(memories) < 6 else 7.5)


def spread(values):
    """Whether a logarithmic axis suits the values."""
    return min(values) > 0 and max(values) > 8 * min(values)


def log_scale(axes, values):
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.4, max(values) * 1.4)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def time_unit(records):
    """(unit, seconds in it) that suits the longest training."""
    longest = max(map(seconds, records))
    return ("hours", 3600) if longest >= 10 * 3600 else ("minutes", 60) if longest >= 180 else ("seconds", 1)
