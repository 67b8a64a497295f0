"""Figures with a panel per memory size and a line per method: accuracies, losses and what ``analyse`` recorded."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.rows import memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.style import PAGE, Style, legend, new_figure, panels
from pycil_wsc.results import ALL, Record

WIDE = "Every task is one unit wide, regardless of its number of epochs."
Lines = list[dict[str, Any]]  # the records of an analysis, a dict per task
Points = dict[float, float]  # what a run recorded at each place of the x axis; empty if it did not


@dataclass(frozen=True)
class Curves:
    """A figure of mean curves."""

    slug: str
    title: str
    axes: tuple[str, str]
    read: Callable[[Record], Points]
    notes: tuple[str, ...] = ()
    markers: bool = False
    banded: bool = False  # show the spread as a band
    from_zero: bool = False

    def draw(self, series: Series) -> Iterator[Plot]:
        """The figure, if any run recorded the points."""
        rows = series.recorded(self.read)
        if rows.empty:
            return
        points = rows.assign(point=[list(points.items()) for points in rows["recorded"]]).explode("point")
        points[["x", "y"]] = [(float(x), float(y)) for x, y in points["point"]]
        memories = sorted(points["memory"].unique())
        figure, axes = panels(len(memories))
        styles: dict[str, Style] = {}
        for name, style in series.styles.items():
            if name in set(rows["name"]):
                styles[name] = style if self.markers else style | {"marker": ""}
        for memory, ax in zip(memories, axes):
            for name, own in points.loc[points["memory"] == memory].groupby("name", sort=False):
                style = styles[str(name)]
                smaller: Style = {"markersize": style.get("markersize", 5) - 1.5} if self.markers else {"linewidth": 1}
                curve = series.summary(own, "x", "y")
                ax.plot(curve.index, curve["mean"], **style | smaller)
                if self.banded:
                    low, high = curve["mean"] - curve["error"], curve["mean"] + curve["error"]
                    ax.fill_between(curve.index, low, high, color=style["color"], alpha=0.18, linewidth=0)
            ax.set_title(textwrap.fill(f"{memory_text(memory)} {series.group.memory_title}", 26))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if self.from_zero:
            axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])  # shared by all panels; set after drawing
        columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
        for number, ax in enumerate(axes):  # only the panels at the left and bottom edges are labelled
            below = number + columns < len(axes)
            ax.set_ylabel("" if number % columns else self.axes[1])
            ax.set_xlabel("" if below else self.axes[0])
            ax.tick_params(labelbottom=not below)
        legend(figure, styles, series.shown)
        errors = "bands" if self.banded else ""
        yield Plot(self.slug, self.title, figure, series.notes(rows, *self.notes, errors=errors))


# ---- what a run recorded ---------------------------------------------------------------------------------------------


def _numbered(values: Iterable[float], first: int = 1) -> Points:
    return dict(enumerate(values, first))


def _in_tasks(tasks: Iterable[Sequence[float]]) -> Points:
    """The values of each task's epochs, the last of them at the task's end. Every task is one unit wide."""
    points = {}
    for task, values in enumerate(tasks):
        for epoch, value in enumerate(values, 1):
            points[task + epoch / len(values)] = value
    return points


def _analysed(record: Record, name: str) -> Lines:
    """The records of one analysis, a dict per task; empty unless every task of the run has one."""
    lines = [line for line in record.analyses if line.get(name)]
    if [line["task"] for line in lines] != list(range(len(record.curve))):
        return []
    return [line[name] | {"share_new": line["share_new"]} for line in lines]


def alignment(record: Record) -> Lines:
    """Those of tasks with past data."""
    lines = _analysed(record, "gradients")
    return [line for line in lines if line["cosine"] is not None and line["norm"] is not None and line["norm_new"]]


def drift(record: Record) -> Lines:
    """The drift between tasks from the second task on."""
    lines = _analysed(record, "drift")
    return [line["between"] | {"share_new": line["share_new"]} for line in lines if line["between"]]


def _losses(record: Record) -> Points:
    """The training loss of each epoch; none for a method without training."""
    losses = record.data.get("train_loss") or []
    return _in_tasks(losses) if all(losses) else {}


def _layer_drift(record: Record) -> Points:
    """Mean over the tasks of the relative drift of each layer that exists in the first record."""
    relative = [line["relative"] for line in drift(record)]
    frame = pd.DataFrame(relative, columns=list(relative[0]) if relative else [], dtype=float)
    return _numbered(frame.mean().fillna(0.0))


def _loss_around(record: Record) -> Points:
    """The loss around the last solution, averaged over the directions; a non-finite loss is a gap."""
    lines = _analysed(record, "flatness")
    return dict(zip(lines[-1]["distance"], np.array(lines[-1]["loss"], dtype=float).mean(0))) if lines else {}


ACCURACY = Curves(
    "curves",
    "Accuracy after each task",
    ("task", "accuracy on all classes seen (%)"),
    lambda record: _numbered(record.curve),
    markers=True,
    banded=True,
)
SCORE = replace(ACCURACY, title="Average score after each task", axes=("task", "average score (%)"))
LOSS = Curves(
    "training-loss",
    "Training loss, mean of each epoch",
    ("tasks learned", "mean training loss (nats)"),
    _losses,
    notes=(WIDE,),
    from_zero=True,
)
ANALYSES = (
    Curves(
        "drift",
        "Parameter drift between tasks",
        ("task", "distance from the previous weights (norm)"),
        lambda record: _numbered((line["norm"] for line in drift(record)), 2),
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
        lambda record: _in_tasks(line["within"]["norm"] for line in _analysed(record, "drift")),
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
    ),
    Curves(
        "dormant",
        "Dormant units after each task",
        ("task", "dormant units (%)"),
        lambda record: _numbered(
            100 * line["share"] for line in _analysed(record, "dormant") if line["share"] is not None
        ),
        markers=True,
        from_zero=True,
    ),
)


def gradients(series: Series) -> Iterator[Plot]:
    """Similarity of the gradients of new and past data against the memory size and the share of new data.

    Also shows the paper's gradient drift with its bound and, if recorded, the parameter drift.
    """
    rows = series.recorded(alignment)
    if rows.empty:
        return
    lines = _lines(rows, alignment)
    moves = _lines(rows, drift)
    lines["ratio"] = lines["norm"] / lines["norm_new"]
    similarity = "gradient similarity (cosine)"
    panels = [(lines, "cosine", similarity), (lines, "ratio", "mean gradient (norm relative to new data's)")]
    if not moves.empty:
        panels.append((moves, "norm", "distance from the previous weights (norm)"))
    figure = new_figure(PAGE, 3.6)
    first, *axes = figure.subplots(1, 1 + len(panels))
    shown = {name: style for name, style in series.styles.items() if name in set(rows["name"])}
    for name, style in shown.items():
        small = style | {"markersize": style.get("markersize", 5) - 1.5}
        means = lines[lines["name"] == name].groupby("memory")["cosine"].mean()
        first.plot(list(map(series.place, means.index)), means, **small)
        for ax, (found, column, _) in zip(axes, panels):
            own = found[found["name"] == name]
            ax.plot(100 * own["share_new"], own[column], **small | {"linestyle": "none"})
    axes[1].axhline(1, color="#8a8f94", linewidth=0.8)
    if ALL in series.memories:
        first.set_xticks(list(map(series.place, series.memories)), list(map(memory_text, series.memories)))
    first.set(xlabel=series.group.memory_title, ylabel=similarity)
    for ax, (_, _, label) in zip(axes, panels):
        ax.set(xlabel="share of new data (%)", ylabel=label)
    legend(figure, shown, series.shown)
    notes = [
        "At the start of each task's training. Left: means over tasks; others: one marker per task and run.",
        "The grey line is the paper's bound.",
    ]
    yield Plot("gradients", "Gradients of new and past data", figure, series.notes(rows, *notes))


def _lines(rows: pd.DataFrame, read: Callable[[Record], Lines]) -> pd.DataFrame:
    """A line per run and line of its records."""
    lines = []
    for name, record in zip(rows["name"], rows["record"]):
        lines += [line | {"name": name, "memory": record.memory} for line in read(record)]
    return pd.DataFrame(lines)
