from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.networks.closed_form_nets import ComputedHead, SummedHead, Sums, without_empty
from pycil_wsc.registry import register_learner


class Discriminants(SummedHead):
    """Linear discriminant analysis: classes are Gaussians with one covariance S, shrunk to the identity.

    With Λ = ((1 - shrinkage) S + shrinkage I)⁻¹ the logits of class mean m are xᵀΛm - mᵀΛm / 2. S is estimated by
    :func:`approximating_oracle`, without which it is useless if there are fewer images than features.
    """

    def __init__(self, width: int, dtype: torch.dtype, shrinkage: float):
        super().__init__(width)
        self.shrinkage = shrinkage
        self.sums = Sums(width, dtype)

    def grow(self, num_classes: int) -> None:
        self.sums.grow(num_classes)
        super().grow(num_classes)

    def sums_of(self, features: Tensor) -> Iterator[tuple[Sums, Tensor, Tensor]]:
        yield self.sums, torch.ones(len(features), dtype=torch.bool, device=features.device), features

    def solve(self) -> None:
        counts = self.sums.counts
        means = self.sums.products / counts.clamp(min=1)  # (d, classes)
        within = torch.addmm(self.sums.gram, means * counts, means.T, alpha=-1).div_(counts.sum())
        share, scale = approximating_oracle(within, counts.sum())
        estimate = shrink_(shrink_(within, share, scale), self.shrinkage, 1)
        factor, failed = torch.linalg.cholesky_ex(estimate)
        weight = torch.linalg.solve(estimate, means) if failed else torch.cholesky_solve(means, factor)
        self.weight = weight.T.float().contiguous()
        self.bias = without_empty(-(means * weight).sum(0).float() / 2, counts)


def approximating_oracle(covariance: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Oracle approximating shrinkage (OAS, Chen et al., 2010) of a covariance, (d, d), of ``number`` centred samples.

    Returns the share of the identity, and the scale of that.
    """
    width = len(covariance)
    scale = covariance.trace() / width
    square = scale.square()
    power = torch.linalg.vector_norm(covariance).square() / width**2
    share = (power + square) / ((number + 1) * (power - square / width))
    return share.nan_to_num(1).clamp(max=1), scale


def shrink_(covariance: Tensor, share: Tensor | float, scale: Tensor | float) -> Tensor:
    """Replace a share of the covariance by a multiple of the identity, in place."""
    covariance.mul_(1 - share)
    covariance.diagonal().add_(share * scale)
    return covariance


@register_learner("slda", nme=False)
class SLDA(ClosedForm):
    """Deep streaming linear discriminant analysis (Hayes and Kanan, CVPR Workshops 2020).

    The covariance is that of all images around their class means, estimated as in the authors' first task. Their later
    updates take the means at the time, which depend on the order.
    """

    @dataclass(frozen=True)
    class Options(ClosedForm.Options):
        shrinkage: float = key(1e-4, "fraction of the identity in the covariance", above=0, high=1)

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        return Discriminants(width, dtype, self.config.options.shrinkage)
