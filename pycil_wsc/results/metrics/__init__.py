"""Metrics of a run, in numpy. Accuracies are percentages; tasks are the actual ones, of any size.

All modules of this package are imported here, so a new file with a registered metric is found automatically.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pycil_wsc import registry
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.results.schema import ImageResult

MOST_CONFUSED = 2000  # classes: a larger confusion matrix would take more than 12 MB of each result


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Top-1 accuracy in percent. ``predictions``: (N, k) class numbers, best first; ``targets``: (N,)."""
    return float(100 * np.mean(predictions[:, 0] == targets))


def top_k_accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Fraction of samples with the target among their k predictions, in percent: (N, k), (N,)."""
    return float(100 * np.mean((predictions == targets[:, None]).any(1)))


def task_accuracies(predictions: np.ndarray, targets: np.ndarray, tasks: np.ndarray) -> list[float]:
    """Accuracy on each task's samples; ``tasks``: (N,) the task of each sample. One percentage per task."""
    masks = [tasks == index for index in range(tasks.max() + 1)]
    return [accuracy(predictions[mask], targets[mask]) for mask in masks]


def confusion_matrix(predictions: np.ndarray, targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts of true (rows) and predicted (columns) classes: (N, k) best first, (N,) -> int64 (classes, classes)."""
    return np.bincount(targets * num_classes + predictions[:, 0], minlength=num_classes**2).reshape(
        num_classes, num_classes
    )


def of_classes(predictions: np.ndarray, targets: np.ndarray) -> list[float]:
    """Accuracy on each class, by number, that has samples: (N, k) best first, (N,). One percentage per class."""
    return [accuracy(predictions[targets == label], targets[targets == label]) for label in np.unique(targets)]


def average_accuracy(curve: Sequence[float]) -> float:
    """Mean over the tasks of the accuracy on all classes seen so far, in percent: PyCIL's "Average Accuracy".

    ``curve[t]``: that accuracy after task t, in percent.
    """
    return float(np.mean(curve))


def new_task_accuracy(matrix: Sequence[Sequence[float]]) -> float:
    """Mean over the tasks of the accuracy on a task's samples right after learning it (plasticity), in percent.

    ``matrix[t]``: the accuracies in percent on tasks 0..t after learning task t (lower triangular).
    """
    return float(np.mean([row[-1] for row in matrix]))


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """Mean over all tasks but the last of (best accuracy - final accuracy); 0 for a single task.

    ``matrix[t]``: the accuracies on tasks 0..t after learning task t (lower triangular). Source: Zhou et al., PyCIL.
    """
    tasks = len(matrix)
    table = np.array([[*row] + [-np.inf] * (tasks - len(row)) for row in matrix])
    drop = table.max(0) - table[-1]
    return float(drop[:-1].mean()) if tasks > 1 else 0.0


def scores(name: str, predicted: np.ndarray, targets: np.ndarray, tasks: np.ndarray) -> dict[str, Json]:
    """``NAME_top1``, ``NAME_top5`` and the accuracy on each task's samples, ``NAME_tasks``, in percent."""
    return {
        f"{name}_top1": accuracy(predicted, targets),
        f"{name}_top5": top_k_accuracy(predicted, targets),
        f"{name}_tasks": task_accuracies(predicted, targets, tasks),
    }


def task_scalars(history: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Scalars of the newest task for curves over tasks. ``history``: the lines of ``metrics.jsonl`` so far."""
    line = history[-1]
    matrix = [line["cnn_tasks"] for line in history]
    values = {
        "cnn_top1": line["cnn_top1"],
        "newest_task": line["cnn_tasks"][-1],
        "forgetting": forgetting(matrix),
    }
    return values | ({"nme_top1": line["nme_top1"]} if "nme_top1" in line else {})


def of_run(history: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The measures of a finished run in its result, from the lines of its ``metrics.jsonl``."""
    curve = [line["cnn_top1"] for line in history]
    matrix = [line["cnn_tasks"] for line in history]
    nme = [line["nme_top1"] for line in history if line.get("nme_top1") is not None]
    measures = {
        "curve": curve,
        "avg_acc": average_accuracy(curve),
        "last_acc": curve[-1],
        "matrix": matrix,
        "forgetting": forgetting(matrix),
        "new_acc": new_task_accuracy(matrix),
        "top5_curve": [line["cnn_top5"] for line in history],
        "nme_curve": nme if len(nme) == len(history) else None,
        "train_loss": [line["train_loss"] for line in history],
        "train_accuracy": [line["train_accuracy"] for line in history],
    }
    return measures | {name: measure(history) for name, measure in registry.metrics.items()}


def check_names() -> None:
    """Raise a :class:`UserError` if a registered metric has the name of another field of the result."""
    for name, measure in registry.metrics.items():
        if name in ImageResult.model_fields and not measure.__module__.startswith(__name__):
            raise UserError(f"register_metric: '{name}' is a field of every result; choose another name")


registry.import_all_of(__name__, __path__)
