"""What a run recorded in the course of its training, as points of a curve: ``{x: y}``, empty if it recorded nothing."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from pycil_wsc.results.run_table import alignment, drift
from pycil_wsc.results.store import Record

Points = dict[float, float]


def _losses(record: Record) -> Points:
    """The training loss of each epoch; none for a method without training."""
    losses = record.data.get("train_loss") or []
    return _in_tasks(losses) if all(losses) else {}


def _drift_of_layers(record: Record) -> Points:
    """Mean over the tasks of the relative drift of each layer that exists in the first record."""
    relative = [line["relative"] for line in drift(record)]
    frame = pd.DataFrame(relative, columns=list(relative[0]) if relative else [], dtype=float)
    return dict(enumerate(frame.mean().fillna(0.0), 1))


def _loss_around(record: Record) -> Points:
    """The loss around the last solution, averaged over the directions; a non-finite loss is a gap."""
    lines = record.analysed("flatness")
    return dict(zip(lines[-1]["distance"], np.array(lines[-1]["loss"], dtype=float).mean(0))) if lines else {}


def _dormant(record: Record) -> Points:
    shares = [line["share"] for line in record.analysed("dormant") if line["share"] is not None]
    return {number: 100 * share for number, share in enumerate(shares, 1)}


def _gradient_ratio(record: Record) -> Points:
    return _by_share((line["share_new"], line["norm"] / line["norm_new"]) for line in alignment(record))


def _cosine(record: Record) -> Points:
    return _by_share((line["share_new"], line["cosine"]) for line in alignment(record))


def _by_share(values: Iterable[tuple[float, float]]) -> Points:
    """The mean of the values with the same fraction of new data, by this fraction in percent."""
    values_of: dict[float, list[float]] = {}
    for share, value in values:
        values_of.setdefault(100 * share, []).append(value)
    return {share: sum(same) / len(same) for share, same in values_of.items()}


def _in_tasks(tasks: Iterable[Sequence[float]]) -> Points:
    """The values of each task's epochs, the last of them at the task's end. Every task is one unit wide."""
    points = {}
    for task, values in enumerate(tasks):
        for epoch, value in enumerate(values, 1):
            points[task + epoch / len(values)] = value
    return points


CURVES: dict[str, Callable[[Record], Points]] = {
    "curves": lambda record: dict(enumerate(record.curve, 1)),
    "training-loss": _losses,
    "gradients": _cosine,
    "gradient-norm": _gradient_ratio,
    "drift": lambda record: dict(enumerate((line["norm"] for line in drift(record)), 2)),
    "drift-layers": _drift_of_layers,
    "drift-within": lambda record: _in_tasks(line["within"]["norm"] for line in record.analysed("drift")),
    "flatness": _loss_around,
    "dormant": _dormant,
}
