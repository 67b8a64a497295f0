"""The small modules that tune a frozen transformer. Each starts as nothing, or nearly so."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

PARALLEL, BRANCH, SEQUENTIAL = "parallel", "branch", "sequential"


class Adapter(nn.Module):
    """``scale * (up @ act(down @ x + b) + c)``, added to what a block's MLP or attention gives (AdaptFormer, 2022).

    ``up``, ``b`` and ``c`` start as 0, ``down`` as the weights of a linear layer of torch.

    Args:
        dim: of the tokens.
        hidden: of the bottleneck.
        scale: a fixed factor; None: a learned one, from 1 on.
        dropout: probability, between the two layers.
        act: None: ReLU.
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
        act: nn.Module | None = None,
        mode: str = PARALLEL,
        place: str = "mlp",
    ):
        super().__init__()
        self.down = nn.Linear(dim, hidden)
        self.up = nn.Linear(hidden, dim)
        self.act = act or nn.ReLU()
        self.scale: nn.Parameter | float = nn.Parameter(torch.ones(())) if scale is None else scale
        self.dropout = dropout
        self.mode = mode
        self.place = place
        with torch.no_grad():
            nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
            for start in (self.down.bias, self.up.weight, self.up.bias):
                nn.init.zeros_(start)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, n, dim) -> (B, n, dim), to be added."""
        hidden = dropout(self.act(self.down(tokens)), self.dropout, self.training)
        return self.up(hidden) * self.scale


class LoRA(nn.Module):
    """``B @ A``, added to the weights of keys and values (LAE; Hu et al., 2022). A starts as a linear layer, B as 0.

    Args:
        dim: of the tokens.
        rank: of the product. Each of the two products also has a learned factor, from 1 on.
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

    Args:
        dim: of the tokens.
        length: how many.
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

    Args:
        dim: of the tokens.
        length: how many.
        depth: 1: they enter the first block and go on to the last (shallow). That of the blocks: each has its own.
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
        if isinstance(layer, nn.Conv2d):
            return output * self.factor.view(-1, 1, 1) + self.shift.view(-1, 1, 1)
        return output * self.factor + self.shift


class Scales(nn.ModuleDict):
    """A :class:`Scale` after each layer with weights of a transformer: SSF (Lian et al., 2022).

    After the embedding of patches, both norms, the attention's two layers and the MLP's two of each block, and after
    the last norm.
    """

    def __init__(self, vit: Any):
        dim = vit.embed_dim
        widths = {"patch_embed.proj": dim, "norm": dim}
        for index, block in enumerate(vit.blocks):
            layers = {"norm1": dim, "attn.qkv": block.attn.qkv.out_features, "attn.proj": dim, "norm2": dim}
            layers |= {"mlp.fc1": block.mlp.fc1.out_features, "mlp.fc2": dim}
            widths |= {f"blocks.{index}.{name}": width for name, width in layers.items()}
        scales = {name: Scale(width) for name, width in widths.items()}
        super().__init__({name.replace(".", "-"): scale for name, scale in scales.items()})
        for name, scale in scales.items():
            vit.get_submodule(name).register_forward_hook(scale.after)

    def switch(self, active: bool) -> None:
        scale: Any
        for scale in self.values():
            scale.active = active
