"""What an analysis is, and what several of them need."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class Observer:
    """Watches a learner through its tasks; the learner is in evaluation mode, and is restored afterwards.

    ``state`` has what a stopped run needs to resume with the same records: numbers, tensors, lists and dicts of them.
    """

    watches_epochs = False  # the first task must be trained here, not taken from another run

    def __init__(self, learner: Any):
        self.learner = learner
        self.state: dict[str, Any] = {}

    def task_started(self, task: Any) -> None:
        """The head has grown; nothing is trained."""

    def epoch_ended(self, task: Any) -> None:
        """After each epoch of each phase."""

    def task_trained(self, task: Any) -> dict[str, Any]:
        """After the task's training, before its exemplars are chosen. Returns the record, of JSON values."""
        raise NotImplementedError

    def batches(self, indices: np.ndarray) -> Iterable[tuple[Tensor, Tensor]]:
        """(images, targets) of these training samples, with the test transform."""
        return self.learner.train_source.batches(
            indices, self.learner.manager.train_targets, self.learner.config.batch_size
        )

    def sample(self, task: Any, number: int) -> np.ndarray:
        """At most ``number`` of the task's samples and the exemplars, evenly over the classes: (n,) indices."""
        indices = self.learner.training_indices(task)
        return indices[np.linspace(0, len(indices) - 1, min(number, len(indices))).astype(int)]

    def share_of_new(self, task: Any) -> float:
        """The paper's lambda: the share of new samples in what the task trains on."""
        past, ratio = len(self.learner.memory), self.learner.config.replay_ratio
        return ratio if past and ratio is not None else len(task.train_indices) / (len(task.train_indices) + past)

    def summed_loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy over all classes seen, whatever the method's own loss: a scalar, summed over the batch."""
        return cross_entropy(self.learner.predict(images).float(), targets, reduction="sum")

    @torch.no_grad()
    def mean_loss(self, indices: np.ndarray) -> float:
        """Mean cross-entropy of these training samples, in nats."""
        return sum(self.summed_loss(*batch).item() for batch in self.batches(indices)) / len(indices)


def finite(number: float) -> float | None:
    """JSON knows neither infinity nor NaN: None."""
    return number if math.isfinite(number) else None
