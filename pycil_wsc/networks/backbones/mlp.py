"""Two fully connected layers, for grey images whose pixels have no neighbours: permuted ones."""

import torch
from torch import Tensor, nn

from pycil_wsc.registry import register_backbone


class MLP(nn.Module):
    """(B, 3, side, side) grey images -> (B, ``out_dim``) features: two layers with ReLU, as Mammoth's for MNIST.

    Reads the first of three equal channels. Weights are uniform as Glorot and Bengio (2010) have it, biases 0.
    """

    def __init__(self, side: int, width: int):
        super().__init__()
        self.side, self.out_dim = side, width
        first, second = nn.Linear(side * side, width), nn.Linear(width, width)
        for layer in (first, second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and images.shape[-1] != self.side:
            raise ValueError(f"made for images of side {self.side}, not {images.shape[-1]}; set convnet_options.side")
        return self.layers(images[:, 0].flatten(1))


@register_backbone("mlp")
def mlp(side: int = 28, width: int = 100) -> MLP:
    """Two hidden layers of ``width`` units, for grey images of this ``side``."""
    if side < 1 or width < 1:
        raise ValueError(f"side={side}, width={width}: give at least 1")
    return MLP(side, width)
