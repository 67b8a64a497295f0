"""A backbone and a head that grows with the tasks."""

import math

import torch
from torch import nn

import convs  # noqa: F401  registers the backbones
from utils.factory import backbones


class IncrementalHead(nn.Linear):
    """A linear classifier whose old rows survive growth exactly.

    New rows are uniform in +-sqrt(3 / in_features) with zero bias: Kaiming's bound for a linear output, as in PyCIL, which
    is 1.73 times ``nn.Linear``'s.
    """

    def __init__(self, in_features, out_features=0):
        with torch.no_grad():
            super().__init__(in_features, 0)
        self.grow(out_features)

    def reset_parameters(self):
        pass  # rows are initialised when they are added

    @torch.no_grad()
    def grow(self, num_classes):
        """Add rows until there are ``num_classes``; the first ``out_features`` rows keep weight and bias to the bit."""
        added = num_classes - self.out_features
        bound = math.sqrt(3 / self.in_features)
        rows = self.weight.new_empty(added, self.in_features).uniform_(-bound, bound)
        self.weight = nn.Parameter(torch.cat([self.weight, rows]))
        self.bias = nn.Parameter(torch.cat([self.bias, self.bias.new_zeros(added)]))
        self.out_features = num_classes


class IncrementalNet(nn.Module):
    """``convnet_type`` by name, and a head with a row for each class seen: (B, 3, H, W) -> (B, classes) logits."""

    def __init__(self, convnet_type):
        super().__init__()
        self.backbone = backbones[convnet_type]()
        self.head = IncrementalHead(self.backbone.out_dim)

    def grow(self, num_classes):
        self.head.grow(num_classes)

    def forward(self, images):
        return self.head(self.backbone(images))
