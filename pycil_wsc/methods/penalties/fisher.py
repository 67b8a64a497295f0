"""The diagonal of the Fisher information as PyCIL estimates it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.step.backward import Backward

if TYPE_CHECKING:
    from pycil_wsc.training.learner import BaseLearner


@torch.enable_grad()
def fisher_of_batches(
    learner: "BaseLearner", task: Task, indices: np.ndarray, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The mean over batches of the squared gradient of the cross-entropy over all classes, for each parameter.

    In training mode, with augmentation, so that batch norm's statistics move. Leaves no gradients.
    """

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        logits = learner.network(batch.images)
        return learner.over.cross_entropy(logits.float(), batch.targets), logits

    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    backward = Backward(learner, learner.main_phase(task), batch_norm_parts=1)  # PyCIL's is computed on one GPU
    batches = learner.batches.number(len(indices))
    learner.eval()
    learner.network.train()
    address = task.index, "fisher"
    with seeding.seeded(learner.config.seed, "dropout", *address, learner.processes.rank, device=learner.device):
        for batch in learner.batches.of(Sampling(indices=indices, mixed=False), *address):
            backward(batch, loss)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    fisher[name] += parameter.grad.square() / batches
    backward.clear()
    return fisher
