"""Predictions and accuracies on the test images of the classes seen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc.data.loader import Source
from pycil_wsc.data.tasks import Task
from pycil_wsc.engine.prediction import best_classes, nearest_means
from pycil_wsc.files import Json
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.results import metrics


@dataclass(frozen=True)
class Predictions:
    """The predicted classes of a task's N test images, best first: int64 numpy (N, <=5)."""

    cnn: np.ndarray  # by logits
    known: np.ndarray  # by the logits of the classes of the image's own task
    nme: np.ndarray | None  # by the nearest mean of exemplars
    finite: Tensor  # flag on the device: whether all logits computed by this process are finite

    def accuracies(self, targets: np.ndarray, tasks: np.ndarray) -> dict[str, Json]:
        """The entries of ``metrics.jsonl`` for images of these ``targets``, first seen in these ``tasks``."""
        line = {f"cnn_{name}": value for name, value in scores(self.cnn, targets, tasks).items()}
        line["cnn_known"] = metrics.accuracy(self.known, targets)
        if self.nme is not None:
            line |= {f"nme_{name}": value for name, value in scores(self.nme, targets, tasks).items()}
        return line


def predictions(learner: BaseLearner, source: Source, task: Task) -> Predictions:
    """The predictions of ``learner`` after ``task`` for the test images ``source``, divided among the processes."""
    manager, device, number = learner.manager, learner.device, len(task.test_indices)
    means = learner.class_means(task.num_seen) if learner.config.nme else None
    means = None if means is None else torch.from_numpy(means).to(device)
    cnn, known, nme, finite = [], [], [], torch.ones((), dtype=torch.bool, device=device)
    others = other_tasks(learner, task)
    for features, _ in learner.forward_over(source, task.test_indices, manager.test_targets):
        with torch.inference_mode(), learner.autocast():
            logits = learner.classify(features)
            finite &= logits.isfinite().all()
            cnn.append(best_classes(logits))
            known.append(best_classes(logits.masked_fill(next(others), -torch.inf)))
        if means is not None:
            nme.append(nearest_means(features, means))
    cnn, known = (learner.gathered(best, number).numpy() for best in (cnn, known))
    return Predictions(cnn, known, None if means is None else learner.gathered(nme, number).numpy(), finite)


def other_tasks(learner: BaseLearner, task: Task) -> Iterator[Tensor]:
    """For each of this process's test batches, the classes that are not in the image's task: bool (B, classes)."""
    manager, processes = learner.manager, learner.processes
    targets, tasks = (of[task.test_indices] for of in (manager.test_targets, manager.test_tasks))
    others = torch.from_numpy(~metrics.allowed_classes(targets, tasks, task.num_seen)).to(learner.device)
    batches = torch.from_numpy(tasks).to(learner.device).split(learner.config.batch_size)
    for batch in batches[processes.rank :: processes.count]:
        yield others[batch]


def accuracy_of(network: nn.Module, learner: BaseLearner, source: Source, task: Task) -> tuple[float, Tensor]:
    """Test an additional network: (top-1 accuracy in percent, whether this process's logits are finite)."""
    network.eval()
    best, finite = [], torch.ones((), dtype=torch.bool, device=learner.device)
    share, targets = learner.processes.share_of_batches, learner.manager.test_targets
    with torch.inference_mode(), learner.autocast():
        for images, _ in source.batches(task.test_indices, targets, learner.config.batch_size, share=share):
            logits = network(images)
            finite &= logits.isfinite().all()
            best.append(best_classes(logits))
    predicted = learner.gathered(best, len(task.test_indices)).numpy()
    return metrics.accuracy(predicted, targets[task.test_indices]), finite


def scores(predictions: np.ndarray, targets: np.ndarray, tasks: np.ndarray) -> dict[str, Json]:
    """``top1``, ``top5`` and the accuracy on each task's samples, in percent."""
    return {
        "top1": metrics.accuracy(predictions, targets),
        "top5": metrics.top_k_accuracy(predictions, targets),
        "tasks": metrics.task_accuracies(predictions, targets, tasks),
    }
