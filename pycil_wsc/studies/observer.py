"""The base class of analyses."""

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pycil_wsc.data.batches.epoch_order import WHOLE, Share
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batches
from pycil_wsc.training.processes import Processes

Record = dict[str, object]  # name -> JSON value


class Settings(Protocol):
    """The keys that analyses read."""

    @property
    def batch_size(self) -> int: ...
    @property
    def replay_ratio(self) -> float | None: ...
    @property
    def seed(self) -> int: ...


class Observed(Protocol):
    """What analyses use of a learner (:class:`pycil_wsc.training.learner.BaseLearner`)."""

    manager: TaskSequence
    memory: ExemplarMemory
    processes: Processes
    device: torch.device
    batches: Batches

    @property
    def config(self) -> Settings: ...
    @property
    def network(self) -> nn.Module: ...
    def predict(self, images: Tensor) -> Tensor: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def eval(self) -> object: ...


class Observer:
    """Observes a learner through its tasks. During each call, the learner is in evaluation mode.

    ``state`` is saved in checkpoints, so that a resumed run records the same: numbers, tensors, and lists and dicts of
    these.
    """

    watches_epochs = False  # if true, the run trains the first task itself rather than load it from another run

    def __init__(self, learner: Observed):
        self.learner = learner
        self.state: State = {}

    def task_started(self, task: Task) -> None:
        """Called when the head has grown, before training."""

    def epoch_ended(self, task: Task) -> None:
        """Called after each epoch of each phase."""

    def task_trained(self, task: Task) -> Record:
        """Called after training, before exemplars are chosen. Returns the task's record, of JSON values."""
        raise NotImplementedError

    def batches(self, indices: np.ndarray, share: Share = WHOLE) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches of these training samples: float32 (B, 3, H, W) with the test transform, and int64 (B,) targets."""
        return self.learner.batches.plain(indices, share=share)

    def shared_batches(self, indices: np.ndarray) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's share of :meth:`batches`, which may be empty. ``learner.processes.sum`` adds up results."""
        return self.batches(indices, share=self.learner.processes.share_of_batches)

    def sample(self, task: Task, number: int) -> np.ndarray:
        """At most ``number`` of the task's samples and the exemplars, evenly spaced over all of these: indices (n,).

        They are sorted by class, so each class has about its share of them.
        """
        indices = self.learner.batches.indices(task)
        return indices[np.linspace(0, len(indices) - 1, min(number, len(indices))).astype(int)]

    def share_of_new(self, task: Task) -> float:
        """The paper's lambda: the fraction of new samples in the task's training data."""
        past = len(self.learner.memory.before(task))
        ratio = self.learner.config.replay_ratio
        return ratio if past and ratio is not None else len(task.train_indices) / (len(task.train_indices) + past)

    def summed_loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy over all classes seen, regardless of the method's loss: a scalar, summed over the batch."""
        logits = self.learner.predict(images)
        if torch.is_grad_enabled() and not logits.requires_grad:  # of an average of the network's weights
            logits = self.learner.network(images)
        return cross_entropy(logits.float(), targets, reduction="sum")

    @torch.no_grad()
    def mean_loss(self, indices: np.ndarray) -> float:
        """Mean cross-entropy on these training samples, in nats; each process computes its share."""
        loss = sum(self.summed_loss(*batch).item() for batch in self.shared_batches(indices))
        return self.learner.processes.sum(torch.tensor(loss, dtype=torch.float64)).item() / len(indices)


def finite(number: float) -> float | None:
    """``number``, or None if it is infinite or NaN, which JSON cannot represent."""
    return number if math.isfinite(number) else None
