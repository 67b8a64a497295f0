"""Linear classifiers that grow with the tasks."""

import math

import torch
from torch import nn


class IncrementalHead(nn.Linear):
    """A linear classifier that grows without changing its old rows.

    New weights are uniform in +-sqrt(3 / in_features) with zero bias: Kaiming's bound for a linear output, as in PyCIL,
    which is 1.73 times that of ``nn.Linear``.
    """

    def __init__(self, in_features: int, out_features: int = 0):
        with torch.no_grad():
            super().__init__(in_features, 0)
        self.grow(out_features)

    def reset_parameters(self) -> None:
        pass  # rows are initialised when they are added

    @torch.no_grad()
    def grow(self, num_classes: int, in_features: int | None = None) -> None:
        """Grow to ``num_classes`` rows, and to ``in_features`` columns if given; old weights are kept exactly."""
        rows, columns = self.out_features, self.in_features
        width = in_features or columns
        bound = math.sqrt(3 / width)
        below, beside = (
            torch.empty(shape, dtype=self.weight.dtype)
            .uniform_(-bound, bound)
            .to(self.weight.device)  # the same on every device
            for shape in ((num_classes - rows, width), (rows, width - columns))
        )
        self.weight = nn.Parameter(torch.cat([torch.cat([self.weight, beside], 1), below]))
        self.bias = nn.Parameter(torch.cat([self.bias, self.bias.new_zeros(num_classes - rows)]))
        self.out_features, self.in_features = num_classes, width

    @torch.no_grad()
    def align(self, num_old: int, factor: float = 1.0) -> None:
        """Scale the rows from ``num_old`` on to ``factor`` times the mean norm of the old rows (Zhao et al., 2020)."""
        norms = self.weight.norm(dim=1)
        self.weight[num_old:] *= factor * norms[:num_old].mean() / norms[num_old:].mean()
