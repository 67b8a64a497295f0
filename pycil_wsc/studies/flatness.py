from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.registry import register_analysis
from pycil_wsc.studies.observer import Observer, Record, finite


@register_analysis("flatness")
class Flatness(Observer):
    """The training loss around a task's solution, along filter-normalised random directions (Li et al., 2018).

    Each filter of a direction is scaled to the norm of the corresponding filter of the weights. A step therefore does
    not depend on the scale of weights that batch norm normalises.

    ``distance``: the step lengths; a step of length 1 has the norm of the weights. ``loss``: for each direction, the
    mean cross-entropy at each distance, on ``samples`` of the task's samples and the exemplars. Batch-norm parameters
    and statistics are not changed.
    """

    directions = 5
    distances = (-1.0, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0)
    samples = 2000

    def task_trained(self, task: Task) -> Record:
        parameters = [p for p in self.learner.network.parameters() if p.requires_grad]
        solution = [p.detach().clone() for p in parameters]
        indices = self.sample(task, self.samples)
        seed = self.learner.config.seed
        losses = []
        try:
            for number in range(self.directions):
                direction = filter_normalised(solution, seeding.generator(seed, "flatness", task.index, number))
                losses.append(
                    [self.loss_at(parameters, solution, direction, distance, indices) for distance in self.distances]
                )
        finally:
            move(parameters, solution)
        return {"distance": list(self.distances), "loss": losses}

    def loss_at(
        self,
        parameters: Sequence[Tensor],
        solution: list[Tensor],
        direction: list[Tensor],
        distance: float,
        indices: np.ndarray,
    ) -> float | None:
        move(parameters, [weight.add(step, alpha=distance) for weight, step in zip(solution, direction)])
        return finite(self.mean_loss(indices))


@torch.no_grad()
def move(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values):
        parameter.copy_(value)


def filter_normalised(weights: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """A Gaussian random direction for each of ``weights``, with each filter d_i scaled to d_i |w_i| / |d_i|.

    Parameters with one dimension (biases and scales) get the direction 0.
    """
    direction = []
    for weight in weights:
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.dim() < 2:
            direction.append(torch.zeros_like(weight))
            continue
        norms = [tensor.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1)) for tensor in (weight, noise)]
        direction.append(noise * norms[0] / norms[1])
    return direction
