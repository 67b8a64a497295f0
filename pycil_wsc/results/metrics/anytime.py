"""Accuracy at any time: tests within the tasks, after every so many steps (the key ``evaluate_every``)."""

from collections.abc import Sequence

from pycil_wsc.files import Json
from pycil_wsc.registry import register_metric

History = Sequence[dict[str, Json]]


@register_metric("anytime_curve")
def anytime_curve(history: History) -> list[list[float]] | None:
    """[optimiser steps, accuracy in percent on all classes seen] of each test within a task; None without any."""
    return [point for line in history for point in line.get("anytime", [])] or None


@register_metric("anytime_auc")
def anytime_auc(history: History) -> float | None:
    """The area under this curve over its length, in percent: the mean of its accuracies (Koh et al., ICLR 2022)."""
    curve = anytime_curve(history)
    return sum(accuracy for _, accuracy in curve) / len(curve) if curve else None
