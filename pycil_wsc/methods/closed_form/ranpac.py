from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.networks.closed_form import ComputedHead, Sums, ridge_regression
from pycil_wsc.registry import register_learner

RIDGES = [10.0**power for power in range(-8, 9)]  # the authors' candidates
HELD_OUT = 5  # one image in this many


class RandomProjection(ComputedHead):
    """Ridge regression on relu(x P) for a random matrix P (d, M), which does not depend on the number of classes.

    The sums over one image in five are kept apart. They suffice to tell the error on these images of a regression on
    the others, over all images so far, so that the ridge parameter does not depend on the order of the tasks. It does
    depend on which images make a task: every fifth of them, sorted by class, is held out.
    """

    projection: Tensor

    def __init__(self, width: int, size: int, dtype: torch.dtype):
        super().__init__(size, width)
        self.register_buffer("projection", torch.randn(width, size))
        self.fitted = Sums(size, dtype)
        self.held_out = Sums(size, dtype)

    def grow(self, num_classes: int) -> None:
        self.fitted.grow(num_classes)
        self.held_out.grow(num_classes)
        super().grow(num_classes)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward((features.float() @ self.projection).relu())

    def add(self, features: Tensor, labels: Tensor) -> None:
        held_out = torch.arange(len(labels), device=labels.device) % HELD_OUT == 0
        held_out &= labels.bincount()[labels] > 1  # the only image of a class is for the regression
        for sums, rows in ((self.held_out, held_out), (self.fitted, ~held_out)):
            projected = (features[rows].to(sums.gram) @ self.projection.to(sums.gram)).relu()
            sums.add(projected, sums.one_hot(labels[rows]))

    def solve(self) -> None:
        gram = self.fitted.gram + self.held_out.gram
        products = self.fitted.products + self.held_out.products
        self.weight = ridge_regression(gram, products, self.ridge()).T.float().contiguous()

    def ridge(self) -> float:
        """The candidate with the least squared error on the images held out, |XW - Y|² = <W, XᵀX W - 2 XᵀY> + |Y|².

        1 if no image is held out, as no class has had two in one task.
        """
        if not self.held_out.products.any():
            return 1.0
        errors = []
        for ridge in RIDGES:
            weight = ridge_regression(self.fitted.gram, self.fitted.products, ridge)
            error = (weight * (self.held_out.gram @ weight - 2 * self.held_out.products)).sum()
            errors.append(error.nan_to_num(torch.inf))
        return RIDGES[int(torch.stack(errors).argmin())]


@register_learner("ranpac", nme=False)
class RanPAC(ClosedForm):
    """RanPAC (McDonnell et al., NeurIPS 2023): ridge regression on a random projection of the features."""

    @dataclass(frozen=True)
    class Options(ClosedForm.Options):
        projection: int = key(10_000, "number M of random features", low=1, high=2**20)

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        return RandomProjection(width, self.config.options.projection, dtype)
