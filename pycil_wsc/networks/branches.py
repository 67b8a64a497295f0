"""The network of APER: a backbone, and a copy of it that is tuned."""

import copy

import torch
from torch import Tensor, nn

from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.layers import eval_frozen
from pycil_wsc.networks.nets import Backbone, IncrementalNet


class Branch(nn.Sequential):
    """A backbone and a head, whose frozen parts stay in evaluation mode."""

    def train(self, mode: bool = True) -> "Branch":
        super().train(mode)
        eval_frozen(self)
        return self


class TwoBranchNet(IncrementalNet):
    """A backbone that stays as the first task left it, beside a copy that the second task tunes.

    From the second task on the features are those of both, (B, 2 d).
    """

    def __init__(self, backbone: Backbone):
        super().__init__(backbone, CosineHead)
        self.tuned: Branch | None = None  # the copy, and the head it is tuned with

    @torch.no_grad()
    def branch(self, classes: int) -> None:
        """Add the second branch, with a new head of ``classes`` rows; the prototypes so far stand for both branches."""
        self.tuned = Branch(copy.deepcopy(self.backbone), CosineHead(self.backbone.out_dim, classes))
        self.backbone.requires_grad_(False)
        self.head.weight = nn.Parameter(self.head.weight.repeat(1, 2))

    def depths(self) -> dict[nn.Parameter, int]:
        found = super().depths()
        return found if self.tuned is None else found | layers.depths([self.tuned[0]])

    def extract(self, images: Tensor) -> Tensor:
        features = self.backbone(images)
        return features if self.tuned is None else torch.cat([features, self.tuned[0](images)], 1)
