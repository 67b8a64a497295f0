"""What learners with a teacher share: the network of before the task, which no longer learns."""

import copy

from pycil_wsc.learners.base import BaseLearner


class DistillingLearner(BaseLearner):
    """``teacher`` is the network as the task before left it, or None in the first task; its forward pass builds no graph."""

    def grow(self, task):
        self.num_old, self.num_seen = task.num_old, task.num_seen
        self.teacher = copy.deepcopy(self.network).requires_grad_(False) if task.index else None
        super().grow(task)

    def teach(self, images):
        """The teacher's logits (B, old classes), or None in the first task. Ask before the network, whose activations stay until the backward pass."""
        return None if self.teacher is None else self.teacher(images)
