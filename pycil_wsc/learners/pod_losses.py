"""PODNet's losses (Douillard et al., 2020)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def nca(logits: Tensor, targets: Tensor, scale: Tensor, margin: float | None) -> Tensor:
    """The NCA loss: -log(exp(z_y - scale x margin) / sum of exp(z_k) over k != y), where positive; (B, classes) -> ().

    ``margin`` None: PyCIL's loss, log(1 + sum of exp(z_k - max z) over k != y) - (z_y - max z).
    """
    of_class = torch.zeros_like(logits, dtype=torch.bool).scatter(1, targets[:, None], True)
    score = logits.gather(1, targets[:, None]).squeeze(1)
    if margin is not None:
        others = logits.masked_fill(of_class, torch.finfo(logits.dtype).min).logsumexp(1)
        return (others - score + scale * margin).relu().mean()
    largest = logits.max(1).values
    others = (logits - largest[:, None]).exp().masked_fill(of_class, 1.0).sum(1)
    return (others.log() - score + largest).mean()


def pooled(stages: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """POD-spatial: the mean distance of the normalised sums of squares over columns and rows."""
    distances = [(sums(new) - sums(old)).norm(dim=1).mean() for new, old in zip(stages, before, strict=True)]
    return torch.stack(distances).mean()


def sums(stage: Tensor) -> Tensor:
    """(B, c, H, W) -> (B, c (H + W)), or the tokens of a transformer (B, n, d) -> (B, n + d), of unit length."""
    squares = stage.float().square()
    return normalize(torch.cat([squares.sum(-1).flatten(1), squares.sum(-2).flatten(1)], 1))
