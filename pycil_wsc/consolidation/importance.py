"""How important each element of the weights is for what is being learned: pure functions, higher is more important.

Lists are parallel, as in :mod:`pycil_wsc.consolidation.functional`. The first four are cheap: they read what is there. The two
diagonals pass over data again: ``model`` is called with a batch of inputs and gives logits, ``params`` is {name: parameter} of the
parameters asked for, ``batches`` an iterable of (inputs, targets). Both need the model in evaluation mode: a batch norm in
training mode would couple the samples. No ``.grad`` is touched.
"""

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy


def moment_score(first, second, step, betas):
    """S = |m_hat| * v_hat, the moments of ``step`` gradients with Adam's bias corrections (the paper's)."""
    scores = torch._foreach_abs(first)
    torch._foreach_mul_(scores, 1 / ((1 - betas[0] ** step) * (1 - betas[1] ** step)))
    torch._foreach_mul_(scores, second)
    return scores


def first_moment_score(first, second, step, betas):
    """S = |m_hat|."""
    return torch._foreach_div(torch._foreach_abs(first), 1 - betas[0] ** step)


def second_moment_score(first, second, step, betas):
    """S = v_hat."""
    return torch._foreach_div(second, 1 - betas[1] ** step)


def drift_score(params, previous):
    """S = |theta - theta_prev|: how far the task has moved the element."""
    return torch._foreach_abs(torch._foreach_sub(params, previous))


MOMENT_SCORES = {"moment": moment_score, "first_moment": first_moment_score, "second_moment": second_moment_score}


def fisher_diagonal(model, params, batches, chunk_size=16):
    """F = 1/N sum_n (d log p(y_n | x_n) / d theta)^2, the empirical Fisher information of each element: {name: tensor}.

    The square of each sample's own gradient, not of a batch's mean. ``chunk_size`` samples' gradients are held at a time.
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


def hessian_diagonal(model, params, batches, probes, generator=None):
    """h = 1/K sum_k v_k * (H v_k) with v_k of random signs: Hutchinson's estimate of the Hessian's diagonal, {name: tensor}.

    H is that of the mean cross-entropy over ``batches``; its products with ``probes`` vectors v_k take a double backward pass each
    over each batch. Importance is its absolute value.
    """
    tensors, estimate, count = (
        list(params.values()),
        {name: torch.zeros_like(param) for name, param in params.items()},
        0,
    )
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
    """-1 or 1 for each element. ``generator`` is on the CPU, so that all devices get the same."""
    return (2 * torch.randint(2, tensor.shape, generator=generator) - 1).to(tensor)
