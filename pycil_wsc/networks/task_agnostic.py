"""The network of TagFex: an expanding one, beside which a second backbone learns features that suit all tasks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc.errors import UserError
from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, ExpandingNet
from pycil_wsc.networks.stages import tokens_of_last_stage


class TaskAgnosticNet(ExpandingNet):
    """DER's network, and for training: a task-agnostic backbone, its projector, and attention that merges both.

    Args:
        backbone: the first task's block.
        agnostic: a second backbone of the same kind.
        side: of the images, by which the number of channels of the last stage is found.
        hidden: features of the projector's hidden layer.
        projected: features that the projector gives.
        heads: of the attention; they share the channels.
    """

    made_anew = ("aux_head", "merged_head", "attention")

    def __init__(
        self, backbone: Backbone, agnostic: nn.Module, side: int, hidden: int, projected: int, heads: int
    ) -> None:
        super().__init__(backbone)
        self.agnostic = agnostic
        with torch.no_grad():
            self.channels = tokens_of_last_stage(agnostic.eval(), torch.zeros(1, 3, side, side))[1].shape[2]
        if self.channels % heads:
            raise UserError(
                f"attn_num_heads: {heads} heads cannot share the {self.channels} channels of the last stage equally; "
                "give a divisor"
            )
        self.projector = nn.Sequential(
            IncrementalHead(self.channels, hidden), nn.ReLU(), IncrementalHead(hidden, projected)
        )
        self.predictor = IncrementalHead(self.channels, self.channels)  # predicts the previous task's agnostic features
        self.attention = MergeAttention(self.channels, heads)
        self.merged_head = IncrementalHead(self.channels)

    def grow_from(self, num_classes: int, num_new: int, share: float) -> None:
        """Grow to ``num_classes`` in total.

        A new block's weights are ``share`` times the previous block's plus 1 - ``share`` times the agnostic ones.
        """
        super().grow(num_classes, num_new + 1)
        self.merged_head = IncrementalHead(self.channels, num_new)
        if len(self.blocks) == 1:
            return
        self.attention.reset()
        with torch.no_grad():
            for new, agnostic in zip(self.blocks[-1].parameters(), self.agnostic.parameters(), strict=True):
                new.mul_(share).add_(agnostic, alpha=1 - share)
        for module in self.blocks[-1].modules():
            if isinstance(module, _BatchNorm):
                module.reset_running_stats()

    def depths(self) -> Mapping[nn.Parameter, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().depths() | layers.depths([self.agnostic])

    def extract_with_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) -> features as :meth:`extract` gives them, and the newest block's last map (B, tokens, C)."""
        old = [block(images) for block in self.blocks[:-1]]
        newest, tokens = tokens_of_last_stage(self.blocks[-1], images)
        return torch.cat([*old, newest], 1), tokens

    def forward(self, images: Tensor) -> Tensor:
        if self.training:  # its batch norms collect statistics like all others
            self.agnostic(images)
        return super().forward(images)


class MergeAttention(nn.Module):
    """Each token of a task's map attends to all tokens of the agnostic map and of its own: (B, tokens, C) each."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.own_norm, self.agnostic_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        names = ("query", "own_key", "agnostic_key", "own_value", "agnostic_value")
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.empty(channels, channels)) for name in names})
        self.reset()

    def reset(self) -> None:
        """New initial weights, on whatever device."""
        for weight in self.weights.values():
            weight.data.copy_(nn.init.xavier_normal_(torch.empty(weight.shape)))
        self.own_norm.reset_parameters()
        self.agnostic_norm.reset_parameters()

    def forward(self, agnostic: Tensor, own: Tensor) -> Tensor:
        agnostic, own = self.agnostic_norm(agnostic), self.own_norm(own)
        keys = torch.cat([self._split(agnostic, "agnostic_key"), self._split(own, "own_key")], 2)
        values = torch.cat([self._split(agnostic, "agnostic_value"), self._split(own, "own_value")], 2)
        merged = scaled_dot_product_attention(self._split(own, "query"), keys, values)
        return merged.transpose(1, 2).flatten(2)

    def _split(self, tokens: Tensor, name: str) -> Tensor:
        """(B, tokens, C) -> (B, heads, tokens, C / heads)."""
        return (tokens @ self.weights[name]).unflatten(2, (self.heads, -1)).transpose(1, 2)
