"""Task-incremental accuracy: the task of each test image is given, and only its classes are considered."""

from collections.abc import Sequence

from pycil_wsc.files import Json
from pycil_wsc.registry import register_metric

History = Sequence[dict[str, Json]]


@register_metric("task_known_curve")
def task_known_curve(history: History) -> list[float] | None:
    """The accuracy on the test images of all tasks so far, after each task; None if 0.1.0 tested some."""
    return [line["cnn_known"] for line in history] if all("cnn_known" in line for line in history) else None


@register_metric("task_known_matrix")
def task_known_matrix(history: History) -> list[list[float]] | None:
    """The accuracies on each task's test images among its own classes: row t after task t; None likewise.

    The mean of the last row is what Mammoth calls the task-incremental accuracy.
    """
    if not all("cnn_known_tasks" in line for line in history):
        return None
    return [line["cnn_known_tasks"] for line in history]


@register_metric("new_known_curve")
def new_known_curve(history: History) -> list[float] | None:
    """The accuracy on each task's test images right after learning it, among the classes of this task alone.

    Plasticity without recency bias: a network that prefers its newest classes gains nothing here. None if 0.1.0
    tested some tasks.
    """
    if not all("cnn_known_tasks" in line for line in history):
        return None
    return [line["cnn_known_tasks"][-1] for line in history]
