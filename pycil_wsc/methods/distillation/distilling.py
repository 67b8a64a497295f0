"""The base class of learners with a teacher: a frozen copy of the network before the task."""

import copy

from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.training.learner import BaseLearner


class DistillingLearner(BaseLearner):
    """``teacher``: the network after the previous task, or None in the first task; its forward pass builds no graph."""

    teacher: IncrementalNet | None
    num_old: int
    num_seen: int

    def grow(self, task: Task) -> None:
        self.num_old, self.num_seen = task.num_old, task.num_seen
        self.teacher = copy.deepcopy(self.network).requires_grad_(False) if task.index else None
        super().grow(task)

    def teach(self, images: Tensor) -> Tensor | None:
        """The teacher's logits (B, old classes), or None in the first task.

        Call it before the network's forward pass, whose activations are held until the backward pass.
        """
        return None if self.teacher is None else self.teacher(images)
