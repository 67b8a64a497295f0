from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.tuned import TunedClosedForm
from pycil_wsc.networks.closed_form_nets import ComputedHead, SummedHead, Sums, ridge_regression, without_empty
from pycil_wsc.registry import register_learner

RIDGES = [10.0**power for power in range(-8, 9)]  # the authors' candidates
HELD_OUT = 5  # one image in this many
SPREAD = 64.0  # how finely images are told apart when these are drawn
MORE = 10  # the ridge is chosen again when for this many images one more has come


class RandomProjection(SummedHead):
    """Ridge regression on relu(x P) for a random matrix P (d, M), which does not depend on the number of classes.

    The sums over one image in five are kept apart. They suffice to tell the error on these images of a regression on
    the others, over all images so far. Which images these are depends on nothing but their own features, so neither the
    order of the images nor an image that is taken out again changes the ridge parameter's choice.

    A choice solves 17 regressions, so it is kept until it may matter: until a class or a tenth more images have come,
    or an image has been taken out or given to another class.
    """

    projection: Tensor
    chosen: Tensor  # (3,): the ridge parameter, and the number of images and of classes that it was chosen by

    def __init__(self, width: int, size: int, dtype: torch.dtype, cosine: bool = False):
        super().__init__(size, width)
        self.cosine = cosine
        self.register_buffer("projection", torch.randn(width, size))
        self.fitted = Sums(size, dtype)
        self.held_out = Sums(size, dtype)
        self.register_buffer("chosen", torch.zeros(3, dtype=dtype))

    def grow(self, num_classes: int) -> None:
        self.fitted.grow(num_classes)
        self.held_out.grow(num_classes)
        super().grow(num_classes)

    def forward(self, features: Tensor) -> Tensor:
        projected = (features.float() @ self.projection).relu()
        if self.cosine:
            return linear(normalize(projected), normalize(self.weight), self.bias)
        return super().forward(projected)

    def sums_of(self, features: Tensor) -> Iterator[tuple[Sums, Tensor, Tensor]]:
        wide = features.to(self.fitted.products)
        projection = self.projection.to(self.fitted.products)
        held_out = is_held_out(wide, projection[:, 0])
        projected = (wide @ projection).relu()
        for sums, rows in ((self.held_out, held_out), (self.fitted, ~held_out)):
            yield sums, rows, projected[rows]

    def remove(self, features: Tensor, labels: Tensor) -> None:
        self.chosen = torch.zeros_like(self.chosen)
        super().remove(features, labels)

    def relabel(self, features: Tensor, before: Tensor, after: Tensor) -> None:
        self.chosen = torch.zeros_like(self.chosen)
        super().relabel(features, before, after)

    def merge(self, label: int, into: int) -> None:
        self.chosen = torch.zeros_like(self.chosen)
        super().merge(label, into)

    def solve(self) -> None:
        gram = self.fitted.gram + self.held_out.gram
        products = self.fitted.products + self.held_out.products
        counts = self.fitted.counts + self.held_out.counts
        ridge = self.kept_ridge(counts)
        self.weight = ridge_regression(gram, products, ridge).T.float().contiguous()
        self.bias = without_empty(torch.zeros_like(self.bias), counts)

    def kept_ridge(self, counts: Tensor) -> float:
        """The ridge parameter of the last choice, or of a new one if that may matter; ``counts``: of each class."""
        ridge, images, classes = self.chosen.tolist()
        number, present = counts.sum().item(), float((counts > 0).sum())
        if present == classes and 0 <= number - images < images / MORE:
            return ridge
        ridge = self.ridge()
        self.chosen = self.chosen.new_tensor([ridge, number, present])
        return ridge

    def ridge(self) -> float:
        """The candidate with the least squared error on the images held out, |XW - Y|² = <W, XᵀX W - 2 XᵀY> + |Y|².

        1 if no class has images on both sides.
        """
        both = (self.held_out.counts > 0) & (self.fitted.counts > 0)
        if not both.any():
            return 1.0
        errors = []
        for ridge in RIDGES:
            weight = ridge_regression(self.fitted.gram, self.fitted.products, ridge)
            error = (weight * (self.held_out.gram @ weight - 2 * self.held_out.products)).sum()
            errors.append(error.nan_to_num(torch.inf))
        return RIDGES[int(torch.stack(errors).argmin())]


def is_held_out(features: Tensor, direction: Tensor) -> Tensor:
    """Which images are held out, one in five: (n, d), (d,) -> bool (n,). Drawn by the cosine with a random direction.

    Rounding of the features changes it for one image in thousands.
    """
    place = SPREAD * (features @ direction) / (features.norm(dim=1) * direction.norm()) * len(direction) ** 0.5
    return place.remainder(1) * HELD_OUT < 1  # no image without features, for which it is no number


@register_learner("ranpac", nme=False)
class RanPAC(TunedClosedForm):
    """RanPAC (McDonnell et al., NeurIPS 2023): ridge regression on a random projection of the features.

    Adapters may learn the first task, as in the paper (``tuning``).
    """

    @dataclass(frozen=True)
    class Options(TunedClosedForm.Options):
        projection: int = key(10_000, "number M of random features", low=1, high=2**20)
        scores: str = key(
            "linear",
            "scores of the classes: `linear`, or `cosine`s with the regression's weights, as in PILOT",
            choices=("linear", "cosine"),
        )

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        options = self.config.options
        return RandomProjection(width, options.projection, dtype, options.scores == "cosine")
