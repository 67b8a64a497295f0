"""Classifiers that are computed from sums over features, which may arrive in any order and in any number of parts."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from pycil_wsc.networks.nets import Backbone, IncrementalNet

NEVER = -torch.inf  # the logit of a class that has no image
PANEL = 64  # rows of a factor that are updated at once, at least
FEW = 16  # a factor is updated by at most a 16th of its rows; for more, factorising anew is cheaper


class ClosedFormNet(IncrementalNet):
    """A backbone, and a classifier that is computed from its features.

    The backbone may learn the first task with a linear layer, ``first_head``, which is there only while it is trained.
    """

    def __init__(self, backbone: Backbone, head: nn.Module):
        super().__init__(backbone, lambda width: head)
        self.first_head: nn.Module | None = None
        self.register_load_state_dict_pre_hook(_without_first_head)


def _without_first_head(network: ClosedFormNet, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Remove ``first_head`` if the ``state`` that is loaded is from after the training of the first task."""
    if not any(name.startswith(f"{prefix}first_head.") for name in state):
        network.first_head = None


class Lent(Backbone):
    """The ``backbone`` of another network, which it may be predicting with: it is used, and left as it is.

    It is neither moved nor put into another mode, and its parameters count as this network's. A state that is loaded
    must have its weights; the tensors are kept as they are, and are this network's state, so that it has memory of its
    own.
    """

    backbone: Backbone

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.out_dim = backbone.out_dim
        self.loaded: dict[str, Tensor] = {}
        vars(self)["backbone"] = backbone  # not as a part of this module
        self._parameters.update(backbone.named_parameters())

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    def train(self, mode: bool = True) -> "Lent":
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Lent":
        return self

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: object) -> None:
        self.loaded = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self.loaded.items()})


class ComputedHead(nn.Module):
    """A linear classifier whose weight (classes, ``width``) and bias (classes,) are computed, float32.

    The images of a task are added in parts (:meth:`add`); then :meth:`solve` computes the weights. What has been added
    can be taken out again (:meth:`remove`), or moved to another class (:meth:`relabel`). A class without images has
    the logit :data:`NEVER`. ``in_features``: d, if the classifier projects its features (B, d) to (B, ``width``).
    ``apart``: whether a class has sums of its own alone, so that it can be left out without its images.
    """

    apart = False
    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, in_features: int | None = None):
        super().__init__()
        self.in_features: int = in_features or width
        self.register_buffer("weight", torch.zeros(0, width))
        self.register_buffer("bias", torch.zeros(0))

    def grow(self, num_classes: int) -> None:
        """Grow to ``num_classes`` rows; new ones are 0 until they are computed."""
        self.weight = with_rows(self.weight, num_classes)
        self.bias = with_rows(self.bias, num_classes)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Learn a part of a task: float32 (n, d), int64 (n,)."""
        raise NotImplementedError(f"{type(self).__name__} has no add")

    def remove(self, features: Tensor, labels: Tensor) -> None:
        """Take out images that were added with these ``labels``: float32 (n, d), int64 (n,)."""
        raise NotImplementedError(f"{type(self).__name__} has no remove")

    def relabel(self, features: Tensor, before: Tensor, after: Tensor) -> None:
        """Move images from the classes ``before`` to the classes ``after``: float32 (n, d), int64 (n,), int64 (n,)."""
        self.remove(features, before)
        self.add(features, after)

    def merge(self, label: int, into: int) -> None:
        """Give the images of one class to another one, as if they had been learned so."""
        raise NotImplementedError(f"{type(self).__name__} has no merge")

    def class_counts(self) -> Tensor:
        """The number of images of each class, infinite where that is not known: (classes,)."""
        raise NotImplementedError(f"{type(self).__name__} has no class_counts")

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


class SummedHead(ComputedHead):
    """A :class:`ComputedHead` that keeps :class:`Sums`, and says by :meth:`sums_of` which image goes into which."""

    def sums_of(self, features: Tensor) -> Iterator[tuple["Sums", Tensor, Tensor]]:
        """Sums, the rows of ``features`` (n, d) that belong there, bool (n,), and these as they are summed: (k, w)."""
        raise NotImplementedError(f"{type(self).__name__} has no sums_of")

    def add(self, features: Tensor, labels: Tensor) -> None:
        for sums, rows, inputs in self.sums_of(features):
            sums.add(inputs, labels[rows])

    def remove(self, features: Tensor, labels: Tensor) -> None:
        for sums, rows, inputs in self.sums_of(features):
            sums.remove(inputs, labels[rows])

    def relabel(self, features: Tensor, before: Tensor, after: Tensor) -> None:
        """The Gram matrices stay as they are, to the bit."""
        for sums, rows, inputs in self.sums_of(features):
            sums.relabel(inputs, before[rows], after[rows])

    def merge(self, label: int, into: int) -> None:
        for module in self.children():
            if isinstance(module, Sums):
                module.merge(label, into)

    def class_counts(self) -> Tensor:
        counts = [module.counts for module in self.children() if isinstance(module, Sums)]
        return torch.stack(counts).sum(0)


class Sums(nn.Module):
    """Sums over all rows of features x and targets y so far.

    ``gram``: of x xᵀ, (d, d), and empty until there are rows; ``products``: of x yᵀ, (d, classes); ``counts``: the
    rows of each class, (classes,).

    Args:
        width: d.
        dtype: of the sums, as wide as the device has (:func:`pycil_wsc.devices.widest_float`).
    """

    gram: Tensor
    products: Tensor
    counts: Tensor

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("gram", torch.zeros(0, 0, dtype=dtype))
        self.register_buffer("products", torch.zeros(width, 0, dtype=dtype))
        self.register_buffer("counts", torch.zeros(0, dtype=dtype))

    def grow(self, num_classes: int) -> None:
        self.products = with_rows(self.products, num_classes, dim=1)
        self.counts = with_rows(self.counts, num_classes)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add rows whose targets are their classes: (n, d), (n,)."""
        targets = self.one_hot(labels)
        self.add_rows(features, targets)
        self.counts = self.counts + targets.sum(0)

    def remove(self, features: Tensor, labels: Tensor) -> None:
        """Take out rows that were added: (n, d), (n,)."""
        targets = self.one_hot(labels)
        self.add_rows(features, targets, sign=-1)
        self.counts = self.counts - targets.sum(0)

    def relabel(self, features: Tensor, before: Tensor, after: Tensor) -> None:
        """Move rows from the classes ``before`` to the classes ``after``: (n, d), (n,), (n,)."""
        change = self.one_hot(after) - self.one_hot(before)
        self.products = self.products + features.to(self.products).T @ change
        self.counts = self.counts + change.sum(0)

    def merge(self, label: int, into: int) -> None:
        """Give the rows of one class to another one; the Gram matrix stays."""
        self.products, self.counts = merged(self.products, label, into, dim=1), merged(self.counts, label, into)

    def add_rows(self, features: Tensor, targets: Tensor, sign: int = 1) -> None:
        """Add rows, or with ``sign`` -1 take them out: (n, d), (n, classes)."""
        features, targets = features.to(self.products), targets.to(self.products)
        if not len(features) and len(self.gram):
            return
        self.add_squares(features, sign)
        self.products = torch.addmm(self.products, features.T, targets, alpha=sign)

    def add_squares(self, features: Tensor, sign: int) -> None:
        if len(self.gram):
            self.gram = torch.addmm(self.gram, features.T, features, alpha=sign)
        else:
            self.gram = (features.T @ features).mul_(sign)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: object) -> None:
        if (gram := state.get(f"{prefix}gram")) is not None:
            self.gram = gram.to(self.gram)  # itself, not a copy: sums are replaced, and never changed in place
        super()._load_from_state_dict(state, prefix, *others)

    def one_hot(self, labels: Tensor) -> Tensor:
        """(n,) classes -> (n, classes) targets."""
        return one_hot(labels, self.products.shape[1]).to(self.products)


def with_rows(tensor: Tensor, number: int, dim: int = 0) -> Tensor:
    """``tensor`` with so many rows along ``dim``; new ones are 0."""
    shape = list(tensor.shape)
    shape[dim] = number - shape[dim]
    if not shape[dim]:
        return tensor
    new = tensor.new_zeros(shape)
    return torch.cat([tensor, new], dim) if tensor.shape[dim] else new


def merged(sums: Tensor, label: int, into: int, dim: int = 0) -> Tensor:
    """Sums of classes along ``dim``, in which the class ``into`` has also those of ``label``, which has none."""
    sums = sums.clone()
    sums.select(dim, into).add_(sums.select(dim, label))
    sums.select(dim, label).zero_()
    return sums


class RidgeSums(Sums):
    """Sums for ridge regression with one parameter ``gamma``, which few more rows do not make from scratch again.

    ``gram`` or ``factor`` is there, the other one is empty. ``factor``: upper triangular U, (d, d), with
    UᵀU = gram + gamma I. Few rows update it (:func:`updated_factor`) in some d² operations each; many are added to the
    Gram matrix, whose factorisation takes d³ / 3.
    """

    factor: Tensor

    def __init__(self, width: int, gamma: float, dtype: torch.dtype):
        super().__init__(width, dtype)
        self.gamma = gamma
        self.register_buffer("factor", torch.zeros(0, 0, dtype=dtype))

    def add_squares(self, features: Tensor, sign: int) -> None:
        none = self.gram.new_zeros(0, 0)
        if sign > 0 and len(features) * FEW <= features.shape[1]:
            self.gram, self.factor = none, updated_factor(self.factorised(), features)
            return
        if len(self.factor):
            self.gram, self.factor = squared(self.factor) - self.gamma * self.identity(), none
        super().add_squares(features, sign)

    def factorised(self) -> Tensor:
        """The factor of all rows so far."""
        if len(self.factor):
            return self.factor
        if not len(self.gram):
            return self.gamma**0.5 * self.identity()
        return torch.linalg.cholesky(self.gram + self.gamma * self.identity(), upper=True)

    def solution(self) -> Tensor:
        """The weights of the regression: (d, classes)."""
        if len(self.gram):
            return ridge_regression(self.gram, self.products, self.gamma)
        return torch.cholesky_solve(self.products, self.factorised(), upper=True)

    def identity(self) -> Tensor:
        return torch.eye(len(self.products), dtype=self.products.dtype, device=self.products.device)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: object) -> None:
        if (factor := state.get(f"{prefix}factor")) is not None:
            self.factor = self.factor.new_zeros(factor.shape)
        super()._load_from_state_dict(state, prefix, *others)


def ridge_regression(gram: Tensor, products: Tensor, gamma: float) -> Tensor:
    """(XᵀX + gamma I)⁻¹ XᵀY: (d, d), (d, classes) -> (d, classes). Infinite where XᵀX + gamma I is singular."""
    regularised = gram.clone()
    regularised.diagonal().add_(gamma)
    factor, failed = torch.linalg.cholesky_ex(regularised)
    solution = torch.cholesky_solve(products, factor)
    return torch.where(failed.bool(), torch.inf, solution)


def updated_factor(factor: Tensor, rows: Tensor) -> Tensor:
    """The upper triangular V with VᵀV = UᵀU + XᵀX, by orthogonal transformations of U over X.

    They do not amplify rounding, as updates of the inverse by Woodbury's formula may. The signs of rows of V are
    arbitrary. Takes about 4 n d² operations.

    Args:
        factor: U, (d, d), which stays as it is.
        rows: X, (n, d), few of them.
    """
    factor, rows = factor.clone(), rows.clone()
    width = max(PANEL, len(rows))
    for start in range(0, len(factor), width):
        panel = slice(start, start + width)
        both = torch.cat([factor[panel, start:], rows[:, start:]])
        height = len(both) - len(rows)
        orthogonal, _ = torch.linalg.qr(both[:, :height], mode="complete")
        both = orthogonal.T @ both
        both[:, :height].triu_()  # what rounding has left below
        factor[panel, start:] = both[:height]
        rows[:, start:] = both[height:]
    return factor


def squared(factor: Tensor) -> Tensor:
    """UᵀU of an upper triangular U, (d, d), without products of its zeros."""
    lower = torch.zeros_like(factor)
    width = 8 * PANEL
    for start in range(0, len(factor), width):
        stop = min(start + width, len(factor))
        lower[start:stop, :stop] = factor[:stop, start:stop].T @ factor[:stop, :stop]
    return lower.tril() + lower.tril(-1).T


def without_empty(bias: Tensor, counts: Tensor) -> Tensor:
    """``bias`` (classes,), float32, with :data:`NEVER` for the classes that have no image."""
    return bias.float().masked_fill(counts <= 0, NEVER)
