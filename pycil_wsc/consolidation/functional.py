"""The operations of Weight Space Consolidation: pure functions on lists of tensors.

Lists are parallel: entry i of each belongs to parameter i and has its shape. A trailing underscore means that the first
argument (for the moments: the first two) is changed in place. Callers hold ``torch.no_grad()``.
"""

from functools import partial

import torch

from pycil_wsc.consolidation.ranking import blocks, top_blocks


def rank_reset_(params, previous, scores, retain, blend, scope="global", eligible=None, peers=None):
    """Keep the elements with the highest scores and blend all others with the weights before the task.

    ``blend``: share of the present weights in the others, 0..1; 0 reverts them. The rest as in :func:`reset_`.
    """
    reset_(params, previous, scores, retain, partial(blend_, blend=blend), scope, eligible, peers)


def reset_(params, others, scores, retain, rule, scope="global", eligible=None, peers=None):
    """Keep the elements with the highest scores and let ``rule`` change all others.

    ``retain``: share kept, 0..1. ``rule``: (params, others, keep) -> None, such as :func:`blend_`, :func:`revert_` or, with ``others`` fresh
    initial values, :func:`replace_` and :func:`shrink_perturb_`. ``scores``, ``scope`` and ``eligible`` as in :func:`top_mask`, ``peers`` as in
    :func:`top_blocks`; elements that are not eligible are left alone. Works block by block: the memory it needs does not grow with the number of elements.
    """
    for i, index, keep in top_blocks(scores, retain, scope, eligible, peers):
        if eligible is not None and eligible[i] is not None:
            keep = keep | ~eligible[i][index]
        rule([params[i][index]], [others[i][index]], [keep])


def update_moments_(first, second, grads, betas, absolute=False, skipped=None):
    """One step of Adam's exponential moments: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2.

    A gradient that is None counts as zero. ``absolute``: m follows |g| instead of g. The moments may be wider than the
    gradients (fp32 for bf16); the arithmetic is done in the moments' type. ``skipped``: None, or a tensor on the device; where
    it is not 0 nothing changes, whatever the gradients are.
    """
    if skipped is not None:
        _update_unless_(skipped != 0, first, second, grads, betas, absolute)
        return
    beta1, beta2 = betas
    present = [i for i, grad in enumerate(grads) if grad is not None]
    m, v, g = ([tensors[i] for i in present] for tensors in (first, second, grads))
    torch._foreach_mul_(first, beta1)
    torch._foreach_mul_(second, beta2)
    if present:
        torch._foreach_add_(m, torch._foreach_abs(g) if absolute else g, alpha=1 - beta1)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)


def _update_unless_(skipped, first, second, grads, betas, absolute):
    for m, v, grad in zip(first, second, grads, strict=True):
        new_m, new_v = m.clone(), v.clone()
        update_moments_([new_m], [new_v], [grad], betas, absolute)
        keep = skipped.to(m.device)
        m.copy_(torch.where(keep, m, new_m))
        v.copy_(torch.where(keep, v, new_v))


def blend_(params, previous, keep, blend):
    """theta <- blend * theta + (1 - blend) * theta_prev where ``keep`` (bool) is false; all else stays, to the bit."""
    for param, before, kept in zip(params, previous, keep, strict=True):
        # At 0 the arithmetic would turn -0.0 into 0.0 and an infinite weight into nan.
        blended = torch.lerp(before, param, blend) if blend else before
        param.copy_(torch.where(kept, param, blended))


def revert_(params, previous, keep):
    """theta <- theta_prev where ``keep`` (bool) is false; exact to the bit."""
    blend_(params, previous, keep, 0.0)


def replace_(params, fresh, keep):
    """theta <- fresh where ``keep`` (bool) is false: initial values of the same layer, drawn anew."""
    blend_(params, fresh, keep, 0.0)


def shrink_perturb_(params, fresh, keep, shrink, perturb):
    """theta <- shrink * theta + perturb * fresh where ``keep`` (bool) is false (Ash and Adams, 2020)."""
    for param, new, kept in zip(params, fresh, keep, strict=True):
        param.copy_(torch.where(kept, param, shrink * param + perturb * new))


def average_(average, params, n):
    """Theta <- (n * Theta + theta) / (n + 1), for a real n >= 0. Theta may be wider than theta (fp32 for bf16)."""
    weight = 1 / (n + 1)
    if all(a.dtype == p.dtype for a, p in zip(average, params, strict=True)):
        torch._foreach_lerp_(average, params, weight)
    else:  # block by block: no widened copy of the weights
        for a, p in zip(average, params):
            for index in blocks(p.shape):
                a[index].lerp_(p[index].to(a.dtype), weight)
