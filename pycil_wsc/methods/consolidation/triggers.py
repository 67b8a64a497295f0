"""Triggers that end the warm-up at a plateau of the training loss or the loss on held-out exemplars."""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from pycil_wsc import seeding
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.state import State
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.learner_config import LearnerConfig


class Plateau:
    """A loss that has not improved on its minimum by more than ``min_delta`` for ``patience`` epochs."""

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.least = math.inf
        self.since = 0

    def reached(self, loss: float) -> bool:
        """Record the loss of an epoch; returns whether the plateau is reached."""
        if loss < self.least - self.min_delta:
            self.least = loss
            self.since = 0
        else:
            self.since += 1
        return self.since >= self.patience

    def state_dict(self) -> State:
        return {"least": self.least, "since": self.since}

    def load_state_dict(self, state: State) -> None:
        self.least, self.since = state["least"], state["since"]


def held_out_exemplars(learner: BaseLearner, task: Task) -> np.ndarray:
    """Indices of a fraction ``wsc.held_out`` of the exemplars of each class, drawn with ``seed``: int64 (n,)."""
    rng = np.random.default_rng(seeding.derived_seed(learner.config.seed, "trigger", task.index))
    counts = held_out_counts(learner.config, learner.memory, task)
    return np.concatenate([rng.permutation(learner.memory.classes[c])[:count] for c, count in counts.items()])


def held_out_counts(config: LearnerConfig, memory: ExemplarMemory, task: Task) -> dict[int, int]:
    """Class -> number of its exemplars to hold out, at least one, for each class that has two or more.

    Raises a :class:`UserError` if there is no such class. ``memory``: at the beginning of ``task``.
    """
    kept = {c: len(memory.classes[c]) for c in sorted(memory.classes)}
    counts = {c: max(1, round(config.wsc.held_out * count)) for c, count in kept.items() if count > 1}
    if not counts:
        raise UserError(
            f"wsc.trigger: 'held_out' needs a class with two exemplars, and task {task.index + 1} has none; "
            "increase memory_per_class or memory_size, or use 'training_loss'"
        )
    return counts


@torch.inference_mode()
def mean_loss(learner: BaseLearner, indices: np.ndarray) -> float:
    """Mean cross-entropy of training images over all classes seen, in evaluation mode with the test transform."""
    learner.eval()
    total = torch.zeros((), device=learner.device)
    share = learner.processes.share_of_batches
    for images, targets in learner.batches.plain(indices, share=share):
        with learner.precision.autocast():
            logits = learner.predict(images)
        total += cross_entropy(logits.float(), targets, reduction="sum")
    return learner.processes.sum_(total).item() / len(indices)
