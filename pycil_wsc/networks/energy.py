"""The network of BEEF: modules that are trained independently of each other, and a classifier that fuses them."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, ExpandingNet


class EnergyNet(ExpandingNet):
    """A block for each task. The newest sees an earlier task as one class: its backward prototype.

    ``head`` classifies by the older blocks, or is the first task's own. ``own_head`` has a row for each earlier task
    and for each new class; ``energy_head`` a row for each class seen, the forward prototypes, by which the block knows
    images that are not its own. Fusion scales and shifts the backward prototypes: ``fusion`` (2, earlier tasks).
    """

    made_anew = ("own_head", "energy_head", "fusion")

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.sizes: list[int] = []  # new classes of each task
        self.register_buffer("tasks", torch.empty(0, dtype=torch.int64))  # the task of each old class
        self.own_head: IncrementalHead | None = None
        self.energy_head = IncrementalHead(self.out_dim)
        self.fusion = nn.Parameter(torch.empty(2, 0))

    def grow(self, num_classes: int, aux_classes: int = 0) -> None:
        """Grow to ``num_classes`` in total, with a new block, a copy of the first one, unless it is the first task."""
        earlier, num_old = len(self.sizes), sum(self.sizes)
        if earlier:
            weight, _ = self.merged()
            self.head = IncrementalHead(weight.shape[1], num_old)
            self.head.weight.data.copy_(weight.detach())
            self.head.requires_grad_(False)
            self.blocks.append(copy.deepcopy(self.blocks[0]).requires_grad_(True))
            self.own_head = IncrementalHead(self.out_dim, earlier + num_classes - num_old)
            self.fusion = nn.Parameter(torch.zeros(2, earlier))
            self.tasks = torch.repeat_interleave(torch.tensor(self.sizes)).to(self.tasks)
        else:
            self.head.grow(num_classes)
        self.energy_head = IncrementalHead(self.out_dim, num_classes)
        self.sizes.append(num_classes - num_old)

    def merged(self) -> tuple[Tensor, Tensor]:
        """Weight (classes, blocks x d) and bias (classes,) of the fused classifier.

        As in PyCIL, the biases of older blocks do not count.
        """
        if self.own_head is None:
            return self.head.weight, self.head.bias
        earlier = len(self.sizes) - 1
        scale, shift = (1 + self.fusion[0])[self.tasks], self.fusion[1][self.tasks]
        weight, bias = self.own_head.weight, self.own_head.bias
        newest = torch.cat([scale[:, None] * weight[:earlier][self.tasks], weight[earlier:]])
        biases = torch.cat([scale * bias[:earlier][self.tasks] + shift, bias[earlier:]])
        older = self.head.weight
        older = torch.cat([older, older.new_zeros(len(newest) - len(older), older.shape[1])])
        return torch.cat([older, newest], 1), biases

    def classify(self, features: Tensor) -> Tensor:
        return linear(features, *self.merged())

    def classify_newest(self, features: Tensor) -> Tensor:
        """Features -> (B, earlier tasks + new classes) logits from the newest block's features; classes in the first
        task.
        """
        head = self.head if self.own_head is None else self.own_head
        return head(features[:, -self.out_dim :])

    def energies(self, features: Tensor) -> Tensor:
        """Features -> :meth:`classify_newest`, beside the logits of the forward prototypes (B, classes)."""
        own = self.classify_newest(features)
        return torch.cat([own, self.energy_head(features[:, -self.out_dim :])], 1)

    def foreign_mass(self, images: Tensor) -> Tensor:
        """The probabilities, added up, with which the newest block takes ``images`` for none of its own: ()."""
        logits = self.energies(self.blocks[-1](images)).float()
        return logits.softmax(1)[:, -self.energy_head.out_features :].sum()

    def train(self, mode: bool = True) -> "EnergyNet":
        """As in PyCIL, the batch norms of all blocks but the first collect statistics in later tasks."""
        super().train(mode)
        self.blocks[1:].train(mode)
        layers.eval_frozen(self)
        return self
