import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.data.batches.epoch_order import epoch_order
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.replay_plan import seed_of
from pycil_wsc.training.step.backward import Backward


@register_learner("agem", epochs=70, milestones=[30, 50])
class AGEM(BaseLearner):
    """Averaged gradient episodic memory (Chaudhry et al., ICLR 2019, https://arxiv.org/abs/1812.00420) as in Mammoth.

    A gradient that would increase the loss of a batch drawn from the memory is projected to one that does not. As in
    Mammoth, the memory gets no more than one batch of each task, at its end; the paper fills it.
    """

    class Plan(BaseLearner.Plan):
        memory_updates = ("step",)
        fills_by_step = False

        def presented(self, task: Task) -> np.ndarray:
            return task.train_indices[: self.config.batch_size]

    memory: StreamMemory

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the batch alone, or of the one that is drawn from the memory."""
        logits = self.network(batch.images).float()
        smoothing = self.config.label_smoothing
        errors = cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        return self.over.mean(errors, batch=batch), logits

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        for drawn in batch.replay:
            self.project(self.reference(drawn), backward)

    def reference(self, drawn: Batch) -> Batch:
        """The drawn batch, as its gradient is taken."""
        return drawn

    def project(self, reference: Batch, backward: Backward) -> None:
        """Remove from the gradient what would increase the loss of ``reference``."""
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        gradients = [parameter.grad.clone() for parameter in parameters]  # pyright: ignore[reportOptionalMemberAccess]
        backward(reference)
        others = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        product = torch.stack([(gradient * other).sum() for gradient, other in zip(gradients, others)]).sum()
        square = torch.stack([other.square().sum() for other in others]).sum()
        factor = torch.where(product < 0, product / square, 0)
        for parameter, gradient, other in zip(parameters, gradients, others):
            parameter.grad = gradient - factor * other

    def end_task(self, task: Task) -> None:
        """Put the first batch of another epoch into the memory."""
        super().end_task(task)
        address = (task.index, "after the task")
        order = epoch_order(task.train_indices, True, seed_of(self.config, "batches", *address))
        samples = order[: self.config.batch_size]
        labels = self.manager.train_targets[samples]
        rng = np.random.default_rng(seed_of(self.config, "stream", *address))
        self.memory.enter(samples, labels, self.memory.choose(labels, rng))
