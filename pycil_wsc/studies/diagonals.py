"""Importance scores from the diagonal of the Fisher information or of the Hessian; each takes a pass over the data.

``model`` maps a batch of inputs to logits (B, classes), ``params`` is {name: parameter} of the parameters to score,
``batches`` an iterable of (inputs (B, ...), targets int64 (B,)), on the model's device. The model must be in evaluation
mode: a batch norm in training mode would couple the samples. ``.grad`` is not touched. Scores have the shape of their
parameter and are summed up in its dtype, but at least in fp32.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from pycil_wsc.consolidation.tensor_checks import plain_name
from pycil_wsc.consolidation.trackers import wide

Batches = Iterable[tuple[Tensor, Tensor]]


def fisher_diagonal(
    model: nn.Module, params: Mapping[str, Tensor], batches: Batches, chunk_size: int = 16
) -> dict[str, Tensor]:
    """F = 1/N sum_n (d log p(y_n | x_n) / d theta)^2, the empirical Fisher information of each element: {name: tensor}.

    The gradient of each sample is squared, not that of a batch's mean.

    Args:
        model: see above; must support ``torch.func.vmap``.
        params: see above; they need not require a gradient.
        batches: see above.
        chunk_size: samples whose gradients are held at a time, each as large as ``params``.

    Raises:
        ValueError: ``batches`` is empty, or an iterator that is used up.
    """
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    model_names = {plain_name(name): name for name in tensors}  # the model's names, which torch.compile changes
    unknown = [name for name in params if plain_name(name) not in model_names]
    if unknown:
        raise ValueError(f"params: '{unknown[0]}' is not the name of a parameter of the model")
    names = {model_names[plain_name(name)]: name for name in params}
    constant = {name: tensor.detach() for name, tensor in tensors.items() if name not in names}
    values = {name: params[given].detach() for name, given in names.items()}

    def negative_log_likelihood(values, sample, target):
        logits = functional_call(model, (values, constant), (sample.unsqueeze(0),))
        return cross_entropy(logits.float(), target.unsqueeze(0))

    gradients = vmap(grad(negative_log_likelihood), in_dims=(None, 0, 0))
    total = _zeros(values)
    count = 0
    for inputs, targets in batches:
        for part, labels in zip(inputs.split(chunk_size), targets.split(chunk_size)):
            for name, gradient in gradients(values, part, labels).items():
                total[name] += gradient.to(total[name].dtype).square().sum(0)
        count += len(inputs)
    _check_count(count)
    return {names[name]: value / count for name, value in total.items()}


def hessian_diagonal(
    model: nn.Module,
    params: Mapping[str, Tensor],
    batches: Batches,
    probes: int,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """h = 1/K sum_k v_k * (H v_k) with v_k of random signs: Hutchinson's estimate of the Hessian's diagonal.

    H is the Hessian of the mean cross-entropy over ``batches``. The estimates of elements may be negative.

    Args:
        model: see above.
        params: see above; the model's own parameters, which require a gradient.
        batches: see above. The graph of one batch's double backward pass is held at a time.
        probes: K, at least 1. Each v_k is as large as ``params`` and takes a double backward pass per batch.
        generator: of the signs, on the CPU, so that they are the same on all devices; None: torch's own.

    Raises:
        ValueError: ``batches`` is empty, or an iterator that is used up, or ``probes`` is below 1.
    """
    if probes < 1:
        raise ValueError(f"probes={probes!r}: give at least 1 random vector")
    tensors = list(params.values())
    estimate = _zeros(params)
    count = 0
    vectors = [[_signs(tensor, generator) for tensor in tensors] for _ in range(probes)]
    for inputs, targets in batches:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            loss = cross_entropy(model(inputs).float(), targets, reduction="sum")
            gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
            for vector in vectors:
                products = torch.autograd.grad(gradients, tensors, vector, retain_graph=True, materialize_grads=True)
                for total, sign, product in zip(estimate.values(), vector, products):
                    total += (sign * product).detach()
        count += len(inputs)
    _check_count(count)
    return {name: value / (probes * count) for name, value in estimate.items()}


def _zeros(params):
    return {name: torch.zeros_like(param, dtype=wide(param.dtype)) for name, param in params.items()}


def _check_count(count):
    if not count:
        raise ValueError("no sample to score parameters by: `batches` is empty, or an iterator already used up")


def _signs(tensor, generator):
    """Random signs, -1 or 1, in the shape of ``tensor``."""
    return (2 * torch.randint(2, tensor.shape, generator=generator) - 1).to(tensor)
