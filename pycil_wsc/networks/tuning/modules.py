"""The small modules that tune a frozen transformer. Each starts as nothing, or nearly so."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")  # of a block, with weights
PARALLEL, BRANCH, SEQUENTIAL = "parallel", "branch", "sequential"


class Adapter(nn.Module):
    """``scale * (up @ act(down @ x + b) + c)``, added to what a block's MLP or attention gives (AdaptFormer, 2022).

    ``up``, ``b`` and ``c`` start as 0, ``down`` (``hidden`` x ``dim``) as the weights of a linear layer of torch.

    Args:
        scale: a fixed factor; None: a learned one, from 1 on.
        dropout: probability, between the two layers.
        mode: ``parallel``: x is the block's stream, before the norm (AdaptFormer). ``branch``: x is what the MLP or the
            attention gets, after the norm (LAE). ``sequential``: x is what these give.
        place: ``mlp`` or ``attn``.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        scale: float | None = 0.1,
        dropout: float = 0.1,
        act: type[nn.Module] = nn.ReLU,
        mode: str = PARALLEL,
        place: str = "mlp",
    ):
        super().__init__()
        self.down = nn.Linear(dim, hidden)
        self.up = nn.Linear(hidden, dim)
        self.act = act()
        self.scale: nn.Parameter | float = nn.Parameter(torch.ones(())) if scale is None else scale
        self.dropout = dropout
        self.mode = mode
        self.place = place
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for start in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(start)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, n, dim) -> (B, n, dim), to be added."""
        hidden = dropout(self.act(self.down(tokens)), self.dropout, self.training)
        return self.up(hidden) * self.scale


class LoRA(nn.Module):
    """``s B @ A``, of rank ``rank``, added to the weights of keys and values (LAE; Hu et al., 2022).

    A starts as a linear layer, B as 0, and the factor s as 1.
    """

    def __init__(self, dim: int, rank: int = 5):
        super().__init__()
        self.down = nn.ParameterList(torch.empty(rank, dim) for _ in range(2))  # A, of keys and of values
        self.up = nn.ParameterList(torch.zeros(dim, rank) for _ in range(2))  # B
        self.scale = nn.ParameterList(torch.ones(()) for _ in range(2))
        for weight in self.down:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, n, dim) -> what is added to queries, keys and values: (B, n, 3 dim), zeros first."""
        keys, values = (
            linear(linear(tokens, down), up) * scale for down, up, scale in zip(self.down, self.up, self.scale)
        )
        return torch.cat([torch.zeros_like(keys), keys, values], -1)


class Prefix(nn.Module):
    """Learned keys and values before those of the tokens (LAE; Li and Liang, 2021), uniform in [0, 0.01] at first.

    Their weights in the attention sum to 1, and add to those of the tokens.
    """

    def __init__(self, dim: int, length: int = 10):
        super().__init__()
        self.keys = nn.Parameter(torch.empty(length, dim).uniform_(0, 0.01))
        self.values = nn.Parameter(torch.empty(length, dim).uniform_(0, 0.01))
        self.key_scale = nn.Parameter(torch.ones(()))
        self.value_scale = nn.Parameter(torch.ones(()))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Keys and values: (1, length, dim) each."""
        return (self.keys * self.key_scale).unsqueeze(0), (self.values * self.value_scale).unsqueeze(0)


class Prompts(nn.Module):
    """Learned tokens beside those of the image (VPT, Jia et al., 2022), 0 at first.

    With a ``depth`` of 1 they enter the first block and go on to the last (shallow). With that of the transformer each
    block has its own (deep).
    """

    def __init__(self, dim: int, length: int, depth: int = 1):
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(depth, length, dim))

    def before(self, block: int, stream: Tensor, image: int) -> Tensor:
        """The tokens that ``block`` gets; the first ``image`` of ``stream`` (B, n, dim) are the image's."""
        if block and len(self.tokens) == 1:
            return stream
        return torch.cat([stream[:, :image], self.tokens[block].expand(stream.shape[0], -1, -1)], 1)


class Scale(nn.Module):
    """A factor and a shift of each feature, near 1 and 0 at first. Acts on what a layer gives, while ``active``."""

    def __init__(self, width: int):
        super().__init__()
        self.factor = nn.Parameter(torch.empty(width).normal_(1, 0.02))
        self.shift = nn.Parameter(torch.empty(width).normal_(0, 0.02))
        self.active = True

    def after(self, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
        """A forward hook of ``layer``, whose features are the last dimension, or the second of a convolution's."""
        if not self.active:
            return output
        shape = (-1, 1, 1) if isinstance(layer, nn.Conv2d) else (-1,)
        return output * self.factor.view(shape) + self.shift.view(shape)


class Scales(nn.ModuleDict):
    """A :class:`Scale` after each layer with weights of a transformer: SSF (Lian et al., 2022).

    After the embedding of patches, both norms, the attention's two layers and the MLP's two of each block, and after
    the last norm.
    """

    def __init__(self, vit: Any):
        super().__init__()
        places = ["patch_embed.proj", "norm"]
        for index in range(len(vit.blocks)):
            places += [f"blocks.{index}.{layer}" for layer in LAYERS]
        for place in places:
            layer = vit.get_submodule(place)
            scale = Scale(len(layer.weight))
            layer.register_forward_hook(scale.after)
            self[place.replace(".", "-")] = scale

    def switch(self, active: bool) -> None:
        scale: Any
        for scale in self.values():
            scale.active = active
