"""Figures with a panel per memory size and a line per method: accuracies, losses and what ``analyse`` recorded."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.style import PAGE, Style, legend, new_figure, panels
from pycil_wsc.results import ALL, Record

WIDE = "Every task is one unit wide, regardless of its number of epochs."


@dataclass(frozen=True)
class Curves:
    """A figure of mean curves. ``read(record)`` gives a run's values, or None if it did not record them.

    ``first``: the place of the first value on the x axis; None: a list of values per task, each task one unit wide.
    ``places(record)``: places on the x axis that a run recorded, instead.
    """

    slug: str
    title: str
    axes: tuple[str, str]
    read: Callable[[Record], Sequence[Any] | None]
    first: int | None = 1
    notes: tuple[str, ...] = ()
    markers: bool = False
    banded: bool = False  # show the spread as a band
    from_zero: bool = False
    places: Callable[[Record], Sequence[float]] | None = None

    def of(self, records: Sequence[Record]) -> tuple[np.ndarray, list[np.ndarray]]:
        """(x values, the y values of each run), up to the length of the shortest run."""
        values = [list(self.read(record) or ()) for record in records]
        if self.places is not None:
            places = self.places(records[0])
            same = [line for record, line in zip(records, values) if self.places(record) == places]
            return np.array(places), [np.array(line, dtype=float) for line in same]
        if self.first is not None:
            shortest = min(map(len, values))
            return np.arange(self.first, self.first + shortest), [np.array(line[:shortest]) for line in values]
        places, columns = [], []
        for task, lines in enumerate(zip(*values)):
            shortest = min(map(len, lines))
            places.append(task + (np.arange(shortest) + 1) / shortest)
            columns.append(np.array([line[:shortest] for line in lines]))
        return np.concatenate(places), list(np.concatenate(columns, axis=1))

    def draw(self, series: Series) -> Iterator[Plot]:
        """The figure, if any run recorded the values."""
        memories = [m for m in series.memories if any(m in series.of(name, self.read) for name in series.methods)]
        if not memories:
            return
        figure, axes = panels(len(memories), sharex=True, sharey=True)
        styles: dict[str, Style] = {}
        for name, style in series.styles.items():
            if series.of(name, self.read):
                styles[name] = style if self.markers else style | {"marker": ""}
        widest = 0.0
        for memory, ax in zip(memories, axes):
            for name, style in styles.items():
                if not (records := series.of(name, self.read).get(memory)):
                    continue
                places, lines = self.of(records)
                smaller: Style = {"markersize": style.get("markersize", 5) - 1.5} if self.markers else {"linewidth": 1}
                means = np.mean(lines, axis=0)
                ax.plot(places, means, **style | smaller)
                if self.banded:
                    width = np.array([series.spread(values) for values in zip(*lines)])
                    widest = max(widest, width.max())
                    ax.fill_between(places, means - width, means + width, color=style["color"], alpha=0.18, linewidth=0)
            ax.set_title(textwrap.fill(f"{memory_text(memory)} {series.group.memory_title}", 26))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if self.from_zero:
            axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])  # shared by all panels; set after drawing
        _label_outside(axes, *self.axes)
        legend(figure, styles, series.shown)
        errors = "bands" if widest else ""
        yield Plot(self.slug, self.title, figure, series.notes(*self.notes, read=self.read, errors=errors))


def _label_outside(axes: Sequence[Axes], x: str, y: str) -> None:
    """Label only the panels at the left and bottom edges."""
    columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for number, ax in enumerate(axes):
        below = number + columns < len(axes)
        ax.set_ylabel("" if number % columns else y)
        ax.set_xlabel("" if below else x)
        ax.tick_params(labelbottom=not below)


# ---- what a run recorded ---------------------------------------------------------------------------------------------


def of_tasks(record: Record, name: str) -> list[dict[str, Any]] | None:
    """The records of one analysis, a dict per task; None unless every task of the run has one."""
    lines = [
        line[name] | {"task": line["task"], "share_new": line["share_new"]}
        for line in record.analyses
        if line.get(name)
    ]
    return lines if [line["task"] for line in lines] == list(range(len(record.curve))) else None


def alignment(record: Record) -> list[dict[str, Any]] | None:
    """The ``gradients`` records of tasks with past data, or None if there are none."""
    found = []
    for line in of_tasks(record, "gradients") or ():
        if line["cosine"] is not None and line["norm"] is not None and line["norm_new"]:
            found.append(line)
    return found or None


def drift(record: Record) -> list[dict[str, Any]] | None:
    """The drift between tasks from the second task on, or None if it was not recorded."""
    lines = of_tasks(record, "drift") or ()
    return [line["between"] | {"share_new": line["share_new"]} for line in lines if line["between"]] or None


def _losses(record: Record) -> list[list[float]] | None:
    """The training loss of each epoch, by task; None for a method without training."""
    losses = record.data.get("train_loss")
    return losses if losses and all(losses) else None


def _drift_norms(record: Record) -> list[float] | None:
    return [line["norm"] for line in drift(record) or ()] or None


def _layer_drift(record: Record) -> list[float] | None:
    """Mean over the tasks of the relative drift of each layer that exists in the first record."""
    lines = drift(record)
    if not lines:
        return None
    means = []
    for layer in lines[0]["relative"]:
        values = [line["relative"][layer] for line in lines if line["relative"].get(layer) is not None]
        means.append(float(np.mean(values or [0.0])))
    return means


def _epoch_drift(record: Record) -> list[list[float]] | None:
    return [line["within"]["norm"] for line in of_tasks(record, "drift") or ()] or None


def _dormant(record: Record) -> list[float] | None:
    """The share of dormant units after each task, in percent."""
    return [100 * line["share"] for line in of_tasks(record, "dormant") or () if line["share"] is not None] or None


def _loss_around(record: Record) -> list[float] | None:
    """The loss around the last solution, averaged over the directions; a non-finite loss is a gap."""
    lines = of_tasks(record, "flatness")
    return list(np.array(lines[-1]["loss"], dtype=float).mean(0)) if lines else None


def _distances(record: Record) -> list[float]:
    return (of_tasks(record, "flatness") or [{"distance": []}])[-1]["distance"]


ACCURACY = Curves(
    "curves",
    "Accuracy after each task",
    ("task", "accuracy on all classes seen (%)"),
    lambda record: record.curve,
    markers=True,
    banded=True,
)
SCORE = Curves(
    "curves",
    "Average score after each task",
    ("task", "average score (%)"),
    lambda record: record.curve,
    markers=True,
    banded=True,
)
LOSS = Curves(
    "training-loss",
    "Training loss, mean of each epoch",
    ("tasks learned", "mean training loss (nats)"),
    _losses,
    first=None,
    notes=(WIDE,),
    from_zero=True,
)
ANALYSES = (
    Curves(
        "drift",
        "Parameter drift between tasks",
        ("task", "distance from the previous weights (norm)"),
        _drift_norms,
        first=2,
        markers=True,
        from_zero=True,
    ),
    Curves(
        "drift-layers",
        "Parameter drift between tasks, by layer",
        ("layer, from the input", "drift (relative to the layer's previous norm)"),
        _layer_drift,
        notes=("Mean over the tasks. Batch norm counts as a layer.",),
        from_zero=True,
    ),
    Curves(
        "drift-within",
        "Parameter drift within a task, by epoch",
        ("tasks learned", "distance moved in the epoch (norm)"),
        _epoch_drift,
        first=None,
        notes=(WIDE,),
        from_zero=True,
    ),
    Curves(
        "flatness",
        "Training loss around the last solution",
        ("step (relative to the weights' norm)", "mean training loss (nats)"),
        _loss_around,
        notes=("Mean over the random, filter-normalised directions.",),
        markers=True,
        places=_distances,
    ),
    Curves(
        "dormant",
        "Dormant units after each task",
        ("task", "dormant units (%)"),
        _dormant,
        markers=True,
        from_zero=True,
    ),
)


def gradients(series: Series) -> Iterator[Plot]:
    """Similarity of the gradients of new and past data against the memory size and the share of new data.

    Also shows the paper's gradient drift with its bound and, if recorded, the parameter drift.
    """
    shown = {name: style for name, style in series.styles.items() if series.of(name, alignment)}
    if not shown:
        return
    figure = new_figure(PAGE, 3.6)
    moved = any(series.of(name, lambda record: alignment(record) and drift(record)) for name in shown)
    axes = figure.subplots(1, 3 + moved)
    for name, style in shown.items():
        small = style | {"markersize": style.get("markersize", 5) - 1.5}
        dots = small | {"linestyle": "none"}
        found = series.of(name, alignment)
        lines = {memory: [line for r in records for line in alignment(r) or ()] for memory, records in found.items()}
        means = [np.mean([line["cosine"] for line in of_size]) for of_size in lines.values()]
        axes[0].plot(list(map(series.place, found)), means, **small)
        every = [line for of_size in lines.values() for line in of_size]
        shares = [100 * line["share_new"] for line in every]
        axes[1].plot(shares, [line["cosine"] for line in every], **dots)
        axes[2].plot(shares, [line["norm"] / line["norm_new"] for line in every], **dots)
        if moved:
            moves = [line for records in found.values() for record in records for line in drift(record) or ()]
            axes[3].plot([100 * line["share_new"] for line in moves], [line["norm"] for line in moves], **dots)
    axes[2].axhline(1, color="#8a8f94", linewidth=0.8)
    if ALL in series.memories:
        axes[0].set_xticks(list(map(series.place, series.memories)), list(map(memory_text, series.memories)))
    axes[0].set(xlabel=series.group.memory_title, ylabel="gradient similarity (cosine)")
    labels = ("gradient similarity (cosine)", "mean gradient (norm relative to new data's)")
    for ax, label in zip(axes[1:], (*labels, "distance from the previous weights (norm)")):
        ax.set(xlabel="share of new data (%)", ylabel=label)
    legend(figure, shown, series.shown)
    notes = [
        "At the start of each task's training. Left: means over tasks; others: one marker per task and run.",
        "The grey line is the paper's bound.",
    ]
    yield Plot("gradients", "Gradients of new and past data", figure, series.notes(*notes, read=alignment))
