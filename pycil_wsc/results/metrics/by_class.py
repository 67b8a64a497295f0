"""Accuracy on single classes, beside the mean: what a long tail costs is in its last classes."""

from collections.abc import Mapping, Sequence

import numpy as np

from pycil_wsc.files import Json
from pycil_wsc.registry import register_metric

History = Sequence[Mapping[str, Json]]


@register_metric("class_accuracies")
def class_accuracies(history: History) -> list[float] | None:
    """The accuracy on each class after the last task, in learning order; None if that was not tested."""
    return history[-1].get("cnn_classes")


@register_metric("weakest_tenth")
def weakest_tenth(history: History) -> float | None:
    """The mean accuracy on the tenth of the classes, at least one, that is recognised worst after the last task."""
    values = class_accuracies(history)
    if not values:
        return None
    return float(np.sort(values)[: max(1, len(values) // 10)].mean())
