"""Linear classifiers that grow with the tasks."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize


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
        below, beside = (
            self.initial_weights(shape, width).to(self.weight.device)  # the same on every device
            for shape in ((num_classes - rows, width), (rows, width - columns))
        )
        biases = self.initial_biases(num_classes - rows, width)
        self.weight = nn.Parameter(torch.cat([torch.cat([self.weight, beside], 1), below]))
        self.bias = nn.Parameter(torch.cat([self.bias, biases.to(self.bias.device)]))
        self.out_features, self.in_features = num_classes, width

    def initial_weights(self, shape: tuple[int, int], width: int) -> Tensor:
        """New weights of rows of ``width``."""
        bound = math.sqrt(3 / width)
        return torch.empty(shape, dtype=self.weight.dtype).uniform_(-bound, bound)

    def initial_biases(self, rows: int, width: int) -> Tensor:
        """New biases: (rows,)."""
        return torch.zeros(rows, dtype=self.bias.dtype)

    @torch.no_grad()
    def align(self, num_old: int, factor: float = 1.0) -> None:
        """Scale the rows from ``num_old`` on to ``factor`` times the mean norm of the old rows (Zhao et al., 2020)."""
        norms = self.weight.norm(dim=1)
        self.weight[num_old:] *= factor * norms[:num_old].mean() / norms[num_old:].mean()


class NormalHead(IncrementalHead):
    """Its new weights are normal with a deviation of 0.02, as those of timm's transformers."""

    def initial_weights(self, shape: tuple[int, int], width: int) -> Tensor:
        return nn.init.trunc_normal_(torch.empty(shape, dtype=self.weight.dtype), std=0.02)


class LinearHead(IncrementalHead):
    """Its new weights and biases are uniform in +-1 / sqrt(in_features), as those of ``nn.Linear``."""

    def initial_weights(self, shape: tuple[int, int], width: int) -> Tensor:
        bound = 1 / math.sqrt(width)
        return torch.empty(shape, dtype=self.weight.dtype).uniform_(-bound, bound)

    def initial_biases(self, rows: int, width: int) -> Tensor:
        return self.initial_weights((rows, 1), width).flatten()


class RowsHead(nn.Module):
    """A head without biases that grows by rows, which are uniform in +-1 / sqrt(in_features) as those of ``nn.Linear``.

    A derived class calls :meth:`grow` at the end of its ``__init__``, and says what the logits are.
    """

    def __init__(self, in_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, in_features))

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return len(self.weight)

    @torch.no_grad()
    def grow(self, num_classes: int) -> None:
        """Grow to ``num_classes`` rows; old ones are kept exactly."""
        rows, columns = self.weight.shape
        below = uniform_rows(num_classes - rows, columns)
        self.weight = nn.Parameter(torch.cat([self.weight, below.to(self.weight)]))


class CosineHead(RowsHead):
    """A cosine classifier that grows: ``scale`` times the cosine of the features and each row (Hou et al., 2019).

    New rows are as PyCIL's first ones; a method may set later ones to the prototypes of its classes.
    """

    def __init__(self, in_features: int, out_features: int = 0):
        super().__init__(in_features)
        self.scale = nn.Parameter(torch.ones(1))
        self.grow(out_features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, in_features) -> (B, classes) logits."""
        return self.scale * linear(normalize(features), normalize(self.weight))


class ProxyHead(nn.Module):
    """A cosine classifier with several proxies of each class, those of earlier tasks frozen (Douillard et al., 2020).

    A class's logit is ``scale`` times the mean of its proxies' cosines, weighted by their softmax. New proxies are
    uniform in +-1 / sqrt(in_features), as in PyCIL.
    """

    made_anew = ("weight",)  # what each task makes anew

    def __init__(self, in_features: int, out_features: int = 0, proxies: int = 10):
        super().__init__()
        self.proxies = proxies
        self.old = nn.Parameter(torch.empty(0, in_features), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(0, in_features))  # the proxies of the newest classes
        self.scale = nn.Parameter(torch.ones(1))
        self.grow(out_features)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return (len(self.old) + len(self.weight)) // self.proxies

    @torch.no_grad()
    def grow(self, num_classes: int) -> None:
        """Grow to ``num_classes`` classes, and freeze the proxies so far; if there is no new class, nothing changes."""
        rows, width = self.proxies * (num_classes - self.out_features), self.in_features
        if rows:
            new = uniform_rows(rows, width)
            self.old = nn.Parameter(torch.cat([self.old, self.weight]), requires_grad=False)
            self.weight = nn.Parameter(new.to(self.old))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: object) -> None:
        """The newest classes may be other ones in a state whose newest ones were removed: rows move between the two."""
        names = [f"{prefix}old", f"{prefix}weight"]
        if all(name in state for name in names):
            proxies = torch.cat([state[name] for name in names])
            state[names[0]], state[names[1]] = proxies[: len(self.old)], proxies[len(self.old) :]
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, in_features) -> (B, classes) logits."""
        proxies = normalize(torch.cat([self.old, self.weight]))
        cosines = linear(normalize(features), proxies).unflatten(1, (-1, self.proxies))  # (B, classes, proxies)
        return self.scale * (cosines.softmax(2) * cosines).sum(2)


def uniform_rows(rows: int, width: int) -> torch.Tensor:
    """Initial weights (rows, width) of cosine classifiers: uniform in +-1 / sqrt(width)."""
    bound = 1 / math.sqrt(width)
    return torch.empty(rows, width).uniform_(-bound, bound)


def part_of(grown: Tensor, old: Tensor) -> Tensor:
    """The part of ``grown`` that an ``old`` tensor has, as a view: a head has new rows, most tensors none."""
    return grown[tuple(slice(size) for size in old.shape)]
