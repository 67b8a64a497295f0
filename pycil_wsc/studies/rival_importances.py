"""Importances computed in another pass over the training data. To add one, put a file into this folder."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from pycil_wsc.registry import register_importance
from pycil_wsc.studies.diagonals import fisher_diagonal, hessian_diagonal
from pycil_wsc.studies.rival_keys import RivalKeys

Tensors = Mapping[str, Tensor]


class Samples(Protocol):
    """The samples to score by, which the processes of a run share; see the ``scores`` of a consolidated learner."""

    seed: int

    def shared(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's batches of images and targets."""
        ...

    def mean(self, values: Tensors) -> dict[str, Tensor]:
        """The mean over all samples, from the mean over those of this process."""
        ...


@register_importance("fisher")
def fisher(network: nn.Module, params: Tensors, previous: Tensors, batches: Samples, options: RivalKeys) -> Tensors:
    """The diagonal of the empirical Fisher information: the mean of each sample's squared gradient of log p(y | x)."""
    return batches.mean(fisher_diagonal(network, params, batches.shared()))


@register_importance("hessian")
def hessian(network: nn.Module, params: Tensors, previous: Tensors, batches: Samples, options: RivalKeys) -> Tensors:
    """The absolute diagonal of the loss's Hessian: Hutchinson's estimate with ``wsc.probes`` random vectors."""
    generator = torch.Generator().manual_seed(batches.seed)
    estimate = batches.mean(hessian_diagonal(network, params, batches.shared(), options.probes, generator))
    return {name: value.abs() for name, value in estimate.items()}
