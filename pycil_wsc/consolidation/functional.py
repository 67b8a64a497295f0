"""The operations of Weight Space Consolidation: pure functions on lists of tensors.

Lists are parallel: entry i of each belongs to parameter i and has its shape. A trailing underscore means that the first
argument (for the moments: the first two) is changed in place. Call these functions under ``torch.no_grad()``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pycil_wsc.consolidation.ranking import Peers, Scores, blocks, top_blocks

Betas = tuple[float, float]
Rule = Callable[[list[Tensor], list[Tensor], list[Tensor]], None]


def rank_reset_(
    params: list[Tensor],
    previous: list[Tensor],
    scores: Sequence[Scores],
    retain: float,
    blend: float,
    scope: str = "global",
    eligible: list[Tensor | None] | None = None,
    peers: Peers | None = None,
) -> None:
    """Keep the elements with the highest scores and blend all others with the weights before the task.

    ``blend``: fraction of the current weights, 0..1; 0 reverts them. Other arguments as for :func:`reset_`.
    """
    reset_(params, previous, scores, retain, partial(blend_, blend=blend), scope, eligible, peers)


def reset_(
    params: list[Tensor],
    others: list[Tensor],
    scores: Sequence[Scores],
    retain: float,
    rule: Rule,
    scope: str = "global",
    eligible: list[Tensor | None] | None = None,
    peers: Peers | None = None,
) -> None:
    """Keep the elements with the highest scores and let ``rule`` change all others.

    Works block by block: the memory it needs does not grow with the number of elements.

    Args:
        params: the weights, changed in place.
        others: the values that ``rule`` combines them with: the weights before the task, or new initial values.
        scores: higher means more important; see :func:`~.ranking.top_mask`.
        retain: fraction of the eligible elements that is kept, 0..1.
        rule: ``(params, others, keep) -> None``, such as :func:`blend_` or :func:`revert_`.
        scope: ``"global"`` ranks all elements together, ``"tensor"`` those of each tensor separately.
        eligible: bool tensors (None: the whole tensor); other elements are neither ranked nor changed.
        peers: the processes that hold the other parts of sharded parameters; see :func:`~.ranking.top_blocks`.

    Raises:
        ValueError: ``retain`` is not within 0..1, or ``scope`` is unknown; nothing is changed.
    """
    for i, index, keep in top_blocks(scores, retain, scope, eligible, peers):
        allowed = None if eligible is None else eligible[i]
        if allowed is not None:
            keep = keep | ~allowed[index]
        rule([params[i][index]], [others[i][index]], [keep])


# ---- moments and scores ----------------------------------------------------------------------------------------------


def update_moments_(
    first: list[Tensor],
    second: list[Tensor],
    grads: list[Tensor | None],
    betas: Betas,
    absolute: bool = False,
    skipped: Tensor | None = None,
) -> None:
    """One update of Adam's moments: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2.

    A gradient that is None counts as zero. ``absolute``: use |g| instead of g for m. The moments may be wider than the
    gradients (fp32 for bf16); the arithmetic is done in the moments' dtype. ``skipped``: None, or a scalar tensor on
    the device; if it is not 0, nothing changes, whatever the gradients are.
    """
    if skipped is not None:
        _update_unless_(skipped != 0, first, second, grads, betas, absolute)
        return
    beta1, beta2 = betas
    present = [(m, v, g) for m, v, g in zip(first, second, grads, strict=True) if g is not None]
    torch._foreach_mul_(first, beta1)
    torch._foreach_mul_(second, beta2)
    if present:
        m, v, g = map(list, zip(*present))
        torch._foreach_add_(m, torch._foreach_abs(g) if absolute else g, alpha=1 - beta1)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)


def _update_unless_(skipped, first, second, grads, betas, absolute):
    for m, v, grad in zip(first, second, grads, strict=True):
        new_m = m.clone()
        new_v = v.clone()
        update_moments_([new_m], [new_v], [grad], betas, absolute)
        keep = skipped.to(m.device)
        m.copy_(torch.where(keep, m, new_m))
        v.copy_(torch.where(keep, v, new_v))


def moment_product(first: list[Tensor], second: list[Tensor], step: float, betas: Betas) -> list[Tensor]:
    """The paper's score, S = |m_hat| * v_hat: the moments of ``step`` gradients with Adam's bias corrections."""
    scores = torch._foreach_abs(first)
    torch._foreach_mul_(scores, 1 / ((1 - betas[0] ** step) * (1 - betas[1] ** step)))
    torch._foreach_mul_(scores, second)
    return list(scores)


def first_moment(first: list[Tensor], second: list[Tensor], step: float, betas: Betas) -> list[Tensor]:
    """S = |m_hat|."""
    return list(torch._foreach_div(torch._foreach_abs(first), 1 - betas[0] ** step))


def second_moment(first: list[Tensor], second: list[Tensor], step: float, betas: Betas) -> list[Tensor]:
    """S = v_hat."""
    return list(torch._foreach_div(second, 1 - betas[1] ** step))


def drift(params: list[Tensor], previous: list[Tensor]) -> list[Tensor]:
    """S = |theta - theta_prev|: how far the task has moved each element."""
    return list(torch._foreach_abs(torch._foreach_sub(params, previous)))


# ---- reset rules -----------------------------------------------------------------------------------------------------


def blend_(params: list[Tensor], previous: list[Tensor], keep: list[Tensor], blend: float) -> None:
    """theta <- blend * theta + (1 - blend) * theta_prev where ``keep`` (bool) is false; no other element changes."""
    for param, before, kept in zip(params, previous, keep, strict=True):
        # At 0 the arithmetic would turn -0.0 into 0.0 and an infinite weight into nan.
        blended = torch.lerp(before, param, blend) if blend else before
        param.copy_(torch.where(kept, param, blended))


def revert_(params: list[Tensor], previous: list[Tensor], keep: list[Tensor]) -> None:
    """theta <- theta_prev, bit for bit, where ``keep`` (bool) is false."""
    blend_(params, previous, keep, 0.0)


# ---- the average -----------------------------------------------------------------------------------------------------


def average_(average: list[Tensor], params: list[Tensor], n: float) -> None:
    """Theta <- (n * Theta + theta) / (n + 1), for a real n >= 0. Theta may be wider than theta (fp32 for bf16)."""
    weight = 1 / (n + 1)
    if all(a.dtype == p.dtype for a, p in zip(average, params, strict=True)):
        torch._foreach_lerp_(average, params, weight)
    else:  # block by block: no widened copy of the weights
        for a, p in zip(average, params):
            for index in blocks(p.shape):
                a[index].lerp_(p[index].to(a.dtype), weight)
