"""Losses that several methods share: float32 logits (B, classes) -> scalar."""

import torch
from torch import Tensor


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy between the two softmaxes at ``temperature``; not multiplied by its square, as in PyCIL.

    ``weights``: (classes,), re-weights the teacher's probabilities, which are then normalised again (FOSTER).
    """
    soft = (teacher_logits.float() / temperature).softmax(1)
    if weights is not None:
        soft = soft * weights
        soft = soft / soft.sum(1, keepdim=True)
    return -(soft * (logits / temperature).log_softmax(1)).sum(1).mean()


def balanced_weights(counts: Tensor, beta: float) -> Tensor:
    """Weights (classes,) inverse to the effective number of samples (Cui et al., 2019), summing to the number of
    classes.

    ``counts``: samples of each class, int (classes,); 0 counts as 1.
    """
    effective = (1 - beta ** counts.cpu().clamp(min=1).double()) / (1 - beta)  # float64, which not all devices have
    weights = 1 / effective
    return (weights * len(counts) / weights.sum()).float()


def newest_task_targets(targets: Tensor, num_old: int) -> Tensor:
    """Targets of an auxiliary head that distinguishes the new classes and labels every old class 0: (B,) -> (B,)."""
    return torch.where(targets < num_old, 0, targets - num_old + 1)
