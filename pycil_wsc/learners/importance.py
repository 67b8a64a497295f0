"""Importances that pass over the training data again. A file beside this one, with a function of its own, adds another."""

import torch

from pycil_wsc.consolidation import fisher_diagonal, hessian_diagonal
from pycil_wsc.registry import register_importance


@register_importance("fisher")
def fisher(network, params, previous, batches, options):
    """The empirical Fisher information's diagonal: each sample's squared gradient of log p(y | x), averaged."""
    return fisher_diagonal(network, params, batches)


@register_importance("hessian")
def hessian(network, params, previous, batches, options):
    """The absolute diagonal of the loss's Hessian, by Hutchinson's estimate from ``wsc.probes`` random vectors."""
    estimate = hessian_diagonal(network, params, batches, options.probes, torch.Generator().manual_seed(batches.seed))
    return {name: value.abs() for name, value in estimate.items()}
