"""Importances that pass over the training data again. To add one, put a file with its function beside this one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycil_wsc.consolidation import fisher_diagonal, hessian_diagonal
from pycil_wsc.registry import register_importance

Tensors = Mapping[str, Tensor]


@register_importance("fisher")
def fisher(network: nn.Module, params: Tensors, previous: Tensors, batches: Any, options: Any) -> Tensors:
    """The empirical Fisher information's diagonal: each sample's squared gradient of log p(y | x), averaged."""
    return fisher_diagonal(network, params, batches)


@register_importance("hessian")
def hessian(network: nn.Module, params: Tensors, previous: Tensors, batches: Any, options: Any) -> Tensors:
    """The absolute diagonal of the loss's Hessian, by Hutchinson's estimate from ``wsc.probes`` random vectors."""
    estimate = hessian_diagonal(network, params, batches, options.probes, torch.Generator().manual_seed(batches.seed))
    return {name: value.abs() for name, value in estimate.items()}
