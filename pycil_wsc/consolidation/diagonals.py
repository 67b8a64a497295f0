"""Diagonals of curvature matrices, which pass over the data again: each element's importance for the loss.

``model`` is called with a batch of inputs and gives logits, ``params`` is {name: parameter} of those to score,
``batches`` an iterable of (inputs, targets). The model must be in evaluation mode: a batch norm in training mode would
couple the samples. No ``.grad`` is touched.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

Batches = Iterable[tuple[Tensor, Tensor]]


def fisher_diagonal(
    model: nn.Module, params: Mapping[str, Tensor], batches: Batches, chunk_size: int = 16
) -> dict[str, Tensor]:
    """F = 1/N sum_n (d log p(y_n | x_n) / d theta)^2, the empirical Fisher information of each element: {name: tensor}.

    The square of each sample's own gradient, not of a batch's mean. ``chunk_size`` samples' gradients are held at a
    time.
    """
    constant = {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name not in params
    }
    values = {name: param.detach() for name, param in params.items()}

    def negative_log_likelihood(values, sample, target):
        logits = functional_call(model, (values, constant), (sample.unsqueeze(0),))
        return cross_entropy(logits.float(), target.unsqueeze(0))

    gradients = vmap(grad(negative_log_likelihood), in_dims=(None, 0, 0))
    total, count = {name: torch.zeros_like(value) for name, value in values.items()}, 0
    for inputs, targets in batches:
        for part, labels in zip(inputs.split(chunk_size), targets.split(chunk_size)):
            for name, each in gradients(values, part, labels).items():
                total[name] += each.square().sum(0)
        count += len(inputs)
    return {name: value / count for name, value in total.items()}


def hessian_diagonal(
    model: nn.Module,
    params: Mapping[str, Tensor],
    batches: Batches,
    probes: int,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """h = 1/K sum_k v_k * (H v_k) with v_k of random signs: Hutchinson's estimate of the Hessian's diagonal.

    H is the Hessian of the mean cross-entropy over ``batches``; its products with ``probes`` vectors v_k take a double
    backward pass each over each batch. ``generator`` is on the CPU, so that all devices get the same signs.
    """
    tensors = list(params.values())
    estimate, count = {name: torch.zeros_like(param) for name, param in params.items()}, 0
    vectors = [[_signs(tensor, generator) for tensor in tensors] for _ in range(probes)]
    for inputs, targets in batches:
        with torch.enable_grad():
            loss = cross_entropy(model(inputs).float(), targets, reduction="sum")
            gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
            for vector in vectors:
                products = torch.autograd.grad(gradients, tensors, vector, retain_graph=True, materialize_grads=True)
                for total, sign, product in zip(estimate.values(), vector, products):
                    total += (sign * product).detach()
        count += len(inputs)
    return {name: value / (probes * count) for name, value in estimate.items()}


def _signs(tensor, generator):
    """-1 or 1 for each element."""
    return (2 * torch.randint(2, tensor.shape, generator=generator) - 1).to(tensor)
