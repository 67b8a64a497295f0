"""Classifiers that are computed from sums over features, which may arrive in any order and in any number of parts."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from pycil_wsc.networks.nets import Backbone, IncrementalNet


class ClosedFormNet(IncrementalNet):
    """A backbone, and a classifier that is computed from its features.

    The backbone may learn the first task with a linear layer, ``first_head``, which is there only while it is trained.
    """

    def __init__(self, backbone: Backbone, head: nn.Module):
        super().__init__(backbone, lambda width: head)
        self.first_head: nn.Module | None = None


class ComputedHead(nn.Module):
    """A linear classifier whose weight (classes, ``width``) and bias (classes,) are computed, float32.

    The images of a task are added in parts (:meth:`add`); then :meth:`solve` computes the weights. ``in_features``: d,
    if the classifier projects its features (B, d) to (B, ``width``).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, in_features: int | None = None):
        super().__init__()
        self.in_features: int = in_features or width
        self.register_buffer("weight", torch.zeros(0, width))
        self.register_buffer("bias", torch.zeros(0))

    def grow(self, num_classes: int) -> None:
        """Grow to ``num_classes`` rows; new ones are 0 until they are computed."""
        new = num_classes - len(self.weight)
        self.weight = torch.cat([self.weight, self.weight.new_zeros(new, self.weight.shape[1])])
        self.bias = torch.cat([self.bias, self.bias.new_zeros(new)])

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Learn a part of a task: float32 (n, d), int64 (n,)."""
        raise NotImplementedError(f"{type(self).__name__} has no add")

    def solve(self) -> None:
        """Compute weight and bias from all parts so far."""
        raise NotImplementedError(f"{type(self).__name__} has no solve")

    def for_prediction(self) -> None:
        """Drop the :class:`Sums`: it predicts as before, and learns nothing more."""
        for name, module in list(self.named_children()):
            if isinstance(module, Sums):
                delattr(self, name)

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes) logits."""
        return linear(features.float(), self.weight, self.bias)


class Sums(nn.Module):
    """Sums over all rows of features x and targets y so far.

    ``gram``: of x xᵀ, (d, d), and empty until there are rows; ``products``: of x yᵀ, (d, classes).

    Args:
        width: d.
        dtype: of the sums, as wide as the device has (:func:`pycil_wsc.devices.widest_float`).
    """

    gram: Tensor
    products: Tensor

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("gram", torch.zeros(0, 0, dtype=dtype))
        self.register_buffer("products", torch.zeros(width, 0, dtype=dtype))

    def grow(self, num_classes: int) -> None:
        new = self.products.new_zeros(len(self.products), num_classes - self.products.shape[1])
        self.products = torch.cat([self.products, new], 1)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Add rows: (n, d), (n, classes)."""
        features, targets = features.to(self.gram), targets.to(self.gram)
        squares = features.T @ features
        self.gram = self.gram + squares if len(self.gram) else squares
        self.products = self.products + features.T @ targets

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: object) -> None:
        if (gram := state.get(f"{prefix}gram")) is not None:
            self.gram = self.gram.new_zeros(gram.shape)
        super()._load_from_state_dict(state, prefix, *others)

    def one_hot(self, labels: Tensor) -> Tensor:
        """(n,) classes -> (n, classes) targets."""
        return one_hot(labels, self.products.shape[1])


def ridge_regression(gram: Tensor, products: Tensor, gamma: float) -> Tensor:
    """(XᵀX + gamma I)⁻¹ XᵀY: (d, d), (d, classes) -> (d, classes). Infinite where XᵀX + gamma I is singular."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + gamma * identity)
    solution = torch.cholesky_solve(products, factor)
    return torch.where(failed.bool(), torch.inf, solution)
