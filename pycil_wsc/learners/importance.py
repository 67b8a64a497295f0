"""Importances computed in another pass over the training data. To add one, put a file into this folder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycil_wsc.consolidation import fisher_diagonal, hessian_diagonal
from pycil_wsc.learners.scoring import UnaugmentedBatches
from pycil_wsc.registry import register_importance

Tensors = Mapping[str, Tensor]


@register_importance("fisher")
def fisher(
    network: nn.Module, params: Tensors, previous: Tensors, batches: UnaugmentedBatches, options: Any
) -> Tensors:
    """The diagonal of the empirical Fisher information: the mean of each sample's squared gradient of log p(y | x)."""
    return batches.mean(fisher_diagonal(network, params, batches.shared()))


@register_importance("hessian")
def hessian(
    network: nn.Module, params: Tensors, previous: Tensors, batches: UnaugmentedBatches, options: Any
) -> Tensors:
    """The absolute diagonal of the loss's Hessian: Hutchinson's estimate with ``wsc.probes`` random vectors."""
    generator = torch.Generator().manual_seed(batches.seed)
    estimate = batches.mean(hessian_diagonal(network, params, batches.shared(), options.probes, generator))
    return {name: value.abs() for name, value in estimate.items()}
