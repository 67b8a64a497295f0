"""What a learner predicts for the test images of the classes seen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.outputs import best_classes, nearest_means


@dataclass(frozen=True)
class Predictions:
    """The predicted classes of a task's N test images, best first: int64 numpy (N, <=5)."""

    cnn: np.ndarray  # by logits
    known: np.ndarray  # by the logits of the classes of the image's own task
    nme: np.ndarray | None  # by the nearest mean of exemplars
    finite: Tensor  # flag on the device: whether all logits computed by this process are finite


def predictions(learner: BaseLearner, source: Source, task: Task) -> Predictions:
    """The predictions of ``learner`` after ``task`` for the test images ``source``, divided among the processes."""
    manager, device, number = learner.manager, learner.device, len(task.test_indices)
    means = learner.class_means(task.num_seen) if learner.config.nme else None
    means = None if means is None else torch.from_numpy(means).to(device)
    cnn, known, nme, finite = [], [], [], torch.ones((), dtype=torch.bool, device=device)
    others = _classes_of_other_tasks(learner, task)
    for features, _ in learner.outputs.in_batches(source, task.test_indices, manager.test_targets):
        with torch.inference_mode(), learner.precision.autocast():
            logits = learner.classify(features)
            finite &= logits.isfinite().all()
            cnn.append(best_classes(logits))
            known.append(best_classes(logits.masked_fill(next(others), -torch.inf)))
        if means is not None:
            nme.append(nearest_means(features, means))
    cnn, known = (learner.outputs.gathered(best, number).numpy() for best in (cnn, known))
    return Predictions(cnn, known, None if means is None else learner.outputs.gathered(nme, number).numpy(), finite)


def predictions_of(network: nn.Module, learner: BaseLearner, source: Source, task: Task) -> tuple[np.ndarray, Tensor]:
    """Those of an additional network of ``learner``: (N, <=5), and whether this process's logits are finite."""
    network.eval()
    best, finite = [], torch.ones((), dtype=torch.bool, device=learner.device)
    share, targets = learner.processes.share_of_batches, learner.manager.test_targets
    with torch.inference_mode(), learner.precision.autocast():
        for images, _ in source.batches(task.test_indices, targets, learner.outputs.batch_size, share=share):
            logits = network(images)[:, : task.num_seen]
            finite &= logits.isfinite().all()
            best.append(best_classes(logits))
    return learner.outputs.gathered(best, len(task.test_indices)).numpy(), finite


def _classes_of_other_tasks(learner: BaseLearner, task: Task) -> Iterator[Tensor]:
    """For each of this process's test batches, the classes that are not in the image's task: bool (B, classes)."""
    manager, processes = learner.manager, learner.processes
    test, train = task.test_indices, np.flatnonzero(manager.train_tasks <= task.index)
    tasks = manager.test_tasks[test]
    others = torch.ones(task.index + 1, task.num_seen, dtype=torch.bool)
    others[tasks, manager.test_targets[test]] = False
    others[manager.train_tasks[train], manager.train_targets[train]] = False  # a class may have no test images
    batches = torch.from_numpy(tasks).split(learner.outputs.batch_size)
    others = others.to(learner.device)
    for batch in batches[processes.rank :: processes.count]:
        yield others[batch.to(learner.device)]
