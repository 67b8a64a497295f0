"""Figures of the records of ``analyse``: gradients, parameter drift, flatness and dormant units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pycil_wsc.report.curves import Curve, concatenated, curves, mean_series
from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.series import Plot, Series
from pycil_wsc.report.style import PAGE, legend, new_figure
from pycil_wsc.results import ALL, Record

WIDE = "Every task is one unit wide, regardless of its number of epochs."


def drift_curves(series: Series) -> Iterator[Plot]:
    """How far each task moved the weights: in total, per layer and per epoch."""
    yield from curves(
        series,
        "drift",
        "Parameter drift between tasks",
        drift,
        lambda records: numbered([[line["norm"] for line in drift(record) or ()] for record in records], 2),
        ("task", "distance from the previous weights (norm)"),
        markers=True,
        from_zero=True,
    )
    yield from curves(
        series,
        "drift-layers",
        "Parameter drift between tasks, by layer",
        layer_drift,
        lambda records: numbered([layer_drift(record) or [] for record in records], 1),
        ("layer, from the input", "drift (relative to the layer's previous norm)"),
        ("Mean over the tasks. Batch norm counts as a layer.",),
        from_zero=True,
    )
    yield from curves(
        series,
        "drift-within",
        "Parameter drift within a task, by epoch",
        lambda record: of_tasks(record, "drift"),
        epoch_drift,
        ("tasks learned", "distance moved in the epoch (norm)"),
        (WIDE,),
        from_zero=True,
    )


def flatness_curves(series: Series) -> Iterator[Plot]:
    """The training loss along random lines through the last weights."""
    yield from curves(
        series,
        "flatness",
        "Training loss around the last solution",
        lambda record: of_tasks(record, "flatness"),
        loss_around,
        ("step (relative to the weights' norm)", "mean training loss (nats)"),
        ("Mean over the random, filter-normalised directions.",),
        markers=True,
    )


def dormant_curves(series: Series) -> Iterator[Plot]:
    """The share of dormant units."""
    yield from curves(
        series,
        "dormant",
        "Dormant units after each task",
        dormant,
        lambda records: numbered([dormant(record) or [] for record in records], 1),
        ("task", "dormant units (%)"),
        markers=True,
        from_zero=True,
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
        found = series.of(name, alignment)
        axes[0].plot(
            list(map(series.place, found)),
            [
                np.mean([line["cosine"] for record in records for line in alignment(record) or ()])
                for records in found.values()
            ],
            **small,
        )
        lines = [line for records in found.values() for record in records for line in alignment(record) or ()]
        shares = [100 * line["share_new"] for line in lines]
        axes[1].plot(shares, [line["cosine"] for line in lines], **small | {"linestyle": "none"})
        axes[2].plot(shares, [line["norm"] / line["norm_new"] for line in lines], **small | {"linestyle": "none"})
        if moved:
            pairs = [
                (100 * line["share_new"], line["norm"])
                for records in found.values()
                for record in records
                for line in drift(record) or ()
            ]
            axes[3].plot(*zip(*pairs) if pairs else ([], []), **small | {"linestyle": "none"})
    axes[2].axhline(1, color="#8a8f94", linewidth=0.8)
    if ALL in series.memories:
        axes[0].set_xticks(list(map(series.place, series.memories)), list(map(memory_text, series.memories)))
    axes[0].set(xlabel=series.group.memory_title, ylabel="gradient similarity (cosine)")
    axes[1].set(xlabel="share of new data (%)", ylabel="gradient similarity (cosine)")
    axes[2].set(xlabel="share of new data (%)", ylabel="mean gradient (norm relative to new data's)")
    if moved:
        axes[3].set(xlabel="share of new data (%)", ylabel="distance from the previous weights (norm)")
    legend(figure, shown, series.shown)
    notes = [
        "At the start of each task's training. Left: means over tasks; others: one marker per task and run.",
        "The grey line is the paper's bound.",
    ]
    yield Plot("gradients", "Gradients of new and past data", figure, series.notes(*notes, read=alignment))


ANALYSES = (gradients, drift_curves, flatness_curves, dormant_curves)


# ---- values recorded by a run ----------------------------------------------------------------------------------------


def of_tasks(record: Record, name: str) -> list[dict[str, Any]] | None:
    """The records of one analysis, a dict per task; None unless every task of the run has one."""
    lines = [
        line[name] | {"task": line["task"], "share_new": line["share_new"]}
        for line in record.analyses
        if line.get(name)
    ]
    return lines if [line["task"] for line in lines] == list(range(len(record.data["curve"]))) else None


def alignment(record: Record) -> list[dict[str, Any]] | None:
    """The ``gradients`` records of tasks with past data, or None if there are none."""
    lines = of_tasks(record, "gradients") or ()
    return [
        line for line in lines if line["cosine"] is not None and line["norm"] is not None and line["norm_new"]
    ] or None


def drift(record: Record) -> list[dict[str, Any]] | None:
    """The drift between tasks from the second task on, or None if it was not recorded."""
    lines = of_tasks(record, "drift") or ()
    return [line["between"] | {"share_new": line["share_new"]} for line in lines if line["between"]] or None


def layer_drift(record: Record) -> list[float] | None:
    """Mean over the tasks of the relative drift of each layer that exists in the first record."""
    lines = drift(record)
    if not lines:
        return None
    values = {layer: [line["relative"].get(layer) for line in lines] for layer in lines[0]["relative"]}
    return [float(np.mean([value for value in line if value is not None] or [0.0])) for line in values.values()]


def dormant(record: Record) -> list[float] | None:
    """The share of dormant units after each task, in percent."""
    lines = of_tasks(record, "dormant") or ()
    return [100 * line["share"] for line in lines if line["share"] is not None] or None


def epoch_drift(records: list[Record]) -> Curve:
    """The distance that the weights moved in each epoch."""
    return concatenated(
        [
            mean_series(epochs)
            for epochs in zip(
                *([line["within"]["norm"] for line in of_tasks(record, "drift") or ()] for record in records)
            )
        ]
    )


def loss_around(records: list[Record]) -> Curve:
    """The loss around the last solution, averaged over the directions; a non-finite loss is a gap."""
    last = [lines[-1] for record in records if (lines := of_tasks(record, "flatness"))]
    losses = np.array(
        [direction for line in last for direction in line["loss"] if line["distance"] == last[0]["distance"]],
        dtype=float,
    )
    return last[0]["distance"], losses.mean(0)


def numbered(values: Sequence[Sequence[float]], first: int) -> Curve:
    """Means over the runs at ``first``, ``first`` + 1, ..."""
    means = mean_series(values)
    return np.arange(first, first + len(means)), means
