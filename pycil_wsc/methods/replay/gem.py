import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import widest_float
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.step.backward import Backward


@register_learner("gem", epochs=100, milestones=[30, 60, 80])
class GEM(BaseLearner):
    """Gradient episodic memory (Lopez-Paz and Ranzato, 2017): no step may increase the loss of an earlier task.

    A gradient that would is projected to the nearest one that does not. As in PyCIL each task's loss is over the logits
    of its own classes, and the exemplars of an earlier task are one batch, augmented once for the whole task.
    """

    class Plan(BaseLearner.Plan):
        plain_first_task = True
        mixes = False  # a batch has images of the task alone

        def check(self) -> str | None:
            if self.config.consolidate and self.config.wsc.trigger == "held_out":
                return (
                    "wsc.trigger: 'held_out' does not work with 'gem', which needs all exemplars; use another trigger"
                )
            return None

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            return self.planned_epochs(task) * len(task.train_indices)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def phases(self, task: Task) -> Iterator[Phase]:
        self.references = []  # (batch, loss) of each earlier task that has exemplars
        targets = self.manager.train_targets[self.memory.indices]
        for earlier in self.manager.tasks[: task.index]:
            first, end = earlier.num_old, earlier.num_seen
            indices = self.memory.indices[(targets >= first) & (targets < end)]
            address = task.index, "references", earlier.index
            samples = Sampling(indices=indices, mixed=False, batch_size=max(1, len(indices)))
            for batch in self.batches.of(samples, *address):
                self.references.append((batch, functools.partial(self.loss_over, first, end)))
        self.keep_statistics()
        yield replace(self.main_phase(task), indices=task.train_indices)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.loss_over(self.first, None, batch)

    def loss_over(self, first: int, end: int | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the logits of the classes from ``first`` to ``end``."""
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits[:, first:end].float(), batch.targets - first), logits

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        """Project the gradient. PyCIL's batch norms see the exemplars first, then the batch; so do these."""
        if not self.references:
            return
        for buffer, before in zip(self.network.buffers(), self.statistics, strict=True):
            buffer.copy_(before)
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        gradients = []
        for samples, loss in [*self.references, (batch, None)]:
            backward(samples, loss)
            gradients.append(torch.cat([_gradient(parameter).flatten() for parameter in parameters]))
        parts = projected(torch.stack(gradients)).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))

    def after_step(self) -> None:
        self.keep_statistics()

    def keep_statistics(self) -> None:
        """Keep those of batch norm, from before the next step."""
        self.statistics = [buffer.clone() for buffer in self.network.buffers()]


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient; zeros if the loss does not depend on the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def projected(gradients: Tensor) -> Tensor:
    """The vector nearest to the last row g that has no negative product with another row of G: (k + 1, n) -> (n,).

    It is g + v G, where v >= 0 minimises its norm: the dual of the quadratic program. Synchronises with the device.
    """
    wide = gradients.to(widest_float(gradients.device))
    products = (wide @ wide.T).cpu().double().numpy()
    weights = np.zeros(len(gradients) - 1)
    if np.isfinite(products).all() and (products[:-1, -1] < 0).any():
        from scipy.optimize import nnls  # slow to import, and needed by this method alone

        values, vectors = np.linalg.eigh(products)
        rows = np.sqrt(values.clip(0))[:, None] * vectors.T  # (k + 1, k + 1), with the same products
        weights, _ = nnls(rows[:, :-1], -rows[:, -1])  # raises if it does not converge
    return (wide[-1] + torch.from_numpy(weights).to(wide.dtype).to(wide.device) @ wide[:-1]).to(gradients)
