"""Langevin dynamics, which draws samples from an energy-based model (Welling and Teh, 2011)."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.enable_grad()
def langevin(
    mass: Callable[[Tensor], Tensor],
    images: Tensor,
    noise: Tensor,
    step_size: float,
    sum_of_processes: Callable[[Tensor], Tensor],
) -> Tensor:
    """Move images down the gradient of the logarithm of ``mass``, with noise: (B, 3, H, W) -> the same shape.

    Args:
        mass: images -> (), a sum over images; the logarithm is that of the sum over all images of all processes.
        noise: (steps, B, 3, H, W), added in each step.
        step_size: factor of the gradient.
        sum_of_processes: adds a tensor up over all processes.
    """
    for added in noise:
        images = images.detach().requires_grad_(True)
        own = mass(images)
        gradient = torch.autograd.grad(own, images)[0] / sum_of_processes(own.detach())
        images = images.detach() - step_size * gradient + added
    return images.detach()
