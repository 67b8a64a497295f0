"""The operations of Weight Space Consolidation: pure functions on lists of tensors.

Lists are parallel: entry i of each belongs to parameter i and has its shape. A trailing underscore means that the first
argument (for the moments: the first two) is changed in place. Callers hold ``torch.no_grad()``.
"""

import torch


def rank_reset_(params, previous, scores, retain, blend, scope="global", eligible=None):
    """Keep the elements with the highest scores and blend all others with the weights before the task.

    ``retain``: share kept, 0..1. ``blend``: share of the present weights in the others, 0..1; 0 reverts them. ``scope`` and
    ``eligible`` as in :func:`top_mask`; elements that are not eligible are left alone.
    """
    keep = top_mask(scores, retain, scope, eligible)
    if eligible is not None:
        keep = [k if e is None else k | ~e for k, e in zip(keep, eligible, strict=True)]
    blend_(params, previous, keep, blend)


def update_moments_(first, second, grads, betas, absolute=False):
    """One step of Adam's exponential moments: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2.

    A gradient that is None counts as zero. ``absolute``: m follows |g| instead of g. The moments may be wider than the
    gradients (fp32 for bf16); the arithmetic is done in the moments' type.
    """
    beta1, beta2 = betas
    present = [i for i, grad in enumerate(grads) if grad is not None]
    m, v, g = ([tensors[i] for i in present] for tensors in (first, second, grads))
    torch._foreach_mul_(first, beta1)
    torch._foreach_mul_(second, beta2)
    if present:
        torch._foreach_add_(m, torch._foreach_abs(g) if absolute else g, alpha=1 - beta1)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)


def moment_score(first, second, step, betas):
    """Importance of each element: S = |m_hat| * v_hat, the moments of ``step`` gradients with Adam's bias corrections."""
    scores = torch._foreach_abs(first)
    torch._foreach_mul_(scores, 1 / ((1 - betas[0] ** step) * (1 - betas[1] ** step)))
    torch._foreach_mul_(scores, second)
    return scores


def top_mask(scores, retain, scope="global", eligible=None):
    """Mark the ``round(retain * n)`` highest of the n eligible elements: a list of bool tensors.

    The number is exact whatever the scores (finite, any sign): of equals the first are marked, by parameter and then by
    position. A threshold alone would mark every element when most scores are zero, as those of unused weights are.

    ``scope``: ``"global"`` ranks the elements of all tensors together, ``"tensor"`` those of each tensor by themselves.
    ``eligible``: None, or a list of bool tensors (None: the whole tensor); other elements are neither counted nor marked.
    """
    eligible = [None] * len(scores) if eligible is None else eligible
    if scope == "global":
        return _top(scores, retain, eligible)
    if scope == "tensor":
        return [_top([s], retain, [e])[0] for s, e in zip(scores, eligible, strict=True)]
    raise ValueError(f"scope={scope!r} is unknown; known: 'global', 'tensor'")


def _top(scores, retain, eligible):
    ranked = torch.cat([s.flatten() if e is None else s[e] for s, e in zip(scores, eligible, strict=True)])
    count = round(retain * ranked.numel())
    if count == 0:
        return [torch.zeros_like(s, dtype=torch.bool) for s in scores]
    # Not kthvalue: on CUDA it is refused under torch.use_deterministic_algorithms.
    threshold = ranked.topk(count, sorted=False).values.min()
    above = [_within(s > threshold, e) for s, e in zip(scores, eligible)]
    tied = [_within(s == threshold, e) for s, e in zip(scores, eligible)]
    vacant = count - int(torch.stack([mask.sum() for mask in above]).sum())
    masks = []
    for mask, ties in zip(above, tied):
        flat = mask.flatten()
        if vacant:
            first = ties.flatten().nonzero().squeeze(1)[:vacant]
            flat[first] = True
            vacant -= len(first)
        masks.append(flat.view(mask.shape))
    return masks


def _within(mask, eligible):
    return mask if eligible is None else mask & eligible


def blend_(params, previous, keep, blend):
    """theta <- blend * theta + (1 - blend) * theta_prev where ``keep`` (bool) is false; all else stays, to the bit."""
    for param, before, kept in zip(params, previous, keep, strict=True):
        # At 0 the arithmetic would turn -0.0 into 0.0 and an infinite weight into nan.
        blended = torch.lerp(before, param, blend) if blend else before
        param.copy_(torch.where(kept, param, blended))


def revert_(params, previous, keep):
    """theta <- theta_prev where ``keep`` (bool) is false; exact to the bit."""
    blend_(params, previous, keep, 0.0)


def average_(average, params, n):
    """Theta <- (n * Theta + theta) / (n + 1), for a real n >= 0. Theta may be wider than theta (fp32 for bf16)."""
    weight = 1 / (n + 1)
    if all(a.dtype == p.dtype for a, p in zip(average, params, strict=True)):
        torch._foreach_lerp_(average, params, weight)
    else:  # one by one: no widened copy of all the weights at once
        for a, p in zip(average, params):
            a.lerp_(p.to(a.dtype), weight)
