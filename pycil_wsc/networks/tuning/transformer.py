"""A vision transformer of timm that is tuned from outside."""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from pycil_wsc.errors import UserError
from pycil_wsc.networks.layers import freeze, layer_groups, mark_frozen
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.networks.tuning.modules import BRANCH, PARALLEL, SEQUENTIAL, Adapter, LoRA, Prefix, Prompts, Scales

NEWEST = -1
KeysAndValues = tuple[Tensor, Tensor]  # (B or 1, p, dim) each
Prefixes = Mapping[int, KeysAndValues] | None  # by the block's number


class TunedTransformer(Backbone):
    """timm's transformer ``vit`` and the sets of modules that tune it: (B, 3, H, W) -> (B, ``out_dim``) features.

    ``vit`` has no classifier, and marks of its frozen parts. :class:`UserError` unless it is a ``VisionTransformer``.
    """

    def __init__(self, vit: Any):
        super().__init__()
        check_transformer(vit)
        self.vit = vit
        self.out_dim: int = vit.out_dim
        self.dim: int = vit.embed_dim  # of the tokens
        self.depth = len(vit.blocks)
        self.sets = nn.ModuleList()
        self.original: Any = None  # a copy from before training, if the transformer itself is trained
        freeze(vit)
        if any(parameter.requires_grad for parameter in vit.parameters()):
            self.original = copy.deepcopy(vit)
            mark_frozen(self.original, ["backbone"])

    def add_blocks(self, module: type[nn.Module], blocks: Iterable[int] | None = None, **options: Any) -> None:
        """Add a set of a ``module(dim, **options)`` in each of ``blocks``, by default all."""
        chosen = range(self.depth) if blocks is None else blocks
        self.sets.append(nn.ModuleDict({str(index): module(self.dim, **options) for index in chosen}))

    def forward(self, images: Tensor, route: int | None = NEWEST, prefixes: Prefixes = None) -> Tensor:
        """(B, 3, H, W) -> (B, d) features. Arguments as of :meth:`tokens`."""
        return self.pooled(self.tokens(images, route, prefixes=prefixes))

    @torch.no_grad()
    def untuned(self, images: Tensor) -> Tensor:
        """The features of the pre-trained model: (B, 3, H, W) -> (B, d), without gradients."""
        return self(images, route=None) if self.original is None else self.original(images)

    def tokens(
        self, images: Tensor, route: int | None = NEWEST, prompts: Tensor | None = None, prefixes: Prefixes = None
    ) -> Tensor:
        """Tokens after the last norm: (B, class and registers + p + patches, dim).

        Args:
            images: normalised: (B, 3, H, W).
            route: the number of the set that acts, negative from the newest; None: none does.
            prompts: tokens from the first block on, after those of class and registers: (B or 1, p, dim).
            prefixes: keys and values before those of a block's tokens.
        """
        vit = self.vit
        active = self._active(route)
        modules = dict(active.items()) if type(active) is nn.ModuleDict else {}
        prefixes = prefixes or {}
        stream = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
        if prompts is not None:
            first = vit.num_prefix_tokens
            inserted = prompts.to(stream.dtype).expand(stream.shape[0], -1, -1)
            stream = torch.cat([stream[:, :first], inserted, stream[:, first:]], 1)
        count = stream.shape[1]
        recomputed = vit.grad_checkpointing and torch.is_grad_enabled()
        run = partial(checkpoint, through, use_reentrant=False) if recomputed else through
        for index, block in enumerate(vit.blocks):
            if isinstance(active, Prompts):
                stream = active.before(index, stream, count)
            stream = run(block, stream, modules.get(str(index)), prefixes.get(index))
        return vit.norm(stream[:, :count])

    def pooled(self, tokens: Tensor, prompts: int = 0) -> Tensor:
        """timm's features of all tokens but the inserted ``prompts``: (B, d)."""
        first = self.vit.num_prefix_tokens
        if prompts:
            tokens = torch.cat([tokens[:, :first], tokens[:, first + prompts :]], 1)
        return self.vit.forward_head(tokens, pre_logits=True)

    def query_position(self) -> Tensor | float:
        """The class token's position embedding, which L2P's prompts share: (1, 1, dim); 0 if there is none."""
        vit = self.vit
        if vit.pos_embed is None or vit.cls_token is None or vit.no_embed_class:
            return 0.0
        return vit.pos_embed[:, :1]

    def layer_groups(self) -> list[list[nn.Parameter]]:
        """The parameters by layer, from the input on; modules in a block are of its layer."""
        groups = [list(group) for group in layer_groups(self.vit)]
        for part in self.sets:
            for name, parameter in part.named_parameters():
                place = name.replace("-", ".").removeprefix("blocks.").partition(".")[0]
                layer = {"norm": self.depth}.get(place, 0)  # layer 0 embeds the patches
                groups[int(place) + 1 if place.isdigit() else layer].append(parameter)
        return groups

    def _active(self, route: int | None) -> nn.Module | None:
        chosen = None if route is None or not len(self.sets) else self.sets[route]
        for part in self.sets:
            if isinstance(part, Scales):
                part.switch(part is chosen)
        return chosen


def through(block: Any, stream: Tensor, module: Any, prefix: KeysAndValues | None) -> Tensor:
    """A block's output (B, n, dim) when ``module`` tunes it, with further keys and values ``prefix``."""
    if module is None and prefix is None:
        return block(stream)

    def attention(normed):
        return attend(block.attn, normed, prefix, module)

    place = module.place if isinstance(module, Adapter) else None
    of_attention = module if place == "attn" else None
    of_mlp = module if place == "mlp" else None
    stream = _residual(stream, block.norm1, attention, block.ls1, block.drop_path1, of_attention)
    return _residual(stream, block.norm2, block.mlp, block.ls2, block.drop_path2, of_mlp)


def _residual(stream: Tensor, norm: Any, function: Any, scale: Any, drop_path: Any, adapter: Any) -> Tensor:
    """``stream`` and what attention or MLP, with their adapter if there is one, add to it."""
    mode = adapter.mode if adapter else None
    normed = norm(stream)
    added = function(normed)
    if mode == BRANCH:
        added = added + adapter(normed)
    added = drop_path(scale(added))
    if mode == PARALLEL:
        added = added + adapter(stream)
    elif mode == SEQUENTIAL:
        added = added + adapter(added)
    return stream + added


def attend(attn: Any, tokens: Tensor, prefix: KeysAndValues | None = None, module: Any = None) -> Tensor:
    """timm's attention ``attn`` over ``tokens`` (B, n, dim), with further keys and values, tuned by ``module``."""
    projected = attn.qkv(tokens)
    if isinstance(module, LoRA):
        projected = projected + module(tokens)
    split = projected.unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    queries, keys, values = split.unbind(0)  # (B, heads, n, head_dim) each
    queries = attn.q_norm(queries)
    keys = attn.k_norm(keys)
    calibrated = isinstance(module, Prefix)
    if calibrated:
        prefix = module()
    if prefix is not None:
        more_keys, more_values = (_of_heads(tensor, attn, keys) for tensor in prefix)
        keys = torch.cat([more_keys, keys], 2)
        values = torch.cat([more_values, values], 2)
    if attn.fused_attn and not calibrated:
        drop = attn.attn_drop.p if attn.training else 0.0
        mixed = scaled_dot_product_attention(queries, keys, values, dropout_p=drop)
    else:
        weights = attn.attn_drop((queries * attn.scale @ keys.mT).softmax(-1))
        if calibrated:
            of_prefix, of_tokens = weights.tensor_split([-tokens.shape[1]], -1)
            total = of_prefix.sum(-1, keepdim=True).clamp(min=1e-12)
            weights = torch.cat([of_prefix / total, of_tokens], -1)
        mixed = weights @ values
    mixed = mixed.transpose(1, 2).flatten(2)
    if hasattr(attn, "norm"):  # not in earlier versions of timm
        mixed = attn.norm(mixed)
    if getattr(attn, "gate", None) is not None:
        mixed = mixed * attn.gate(tokens).sigmoid()
    return attn.proj_drop(attn.proj(mixed))


def _of_heads(rows: Tensor, attn: Any, like: Tensor) -> Tensor:
    """(B or 1, p, dim) -> (B, heads, p, head_dim), in the precision of ``like``."""
    heads = rows.to(like.dtype).unflatten(-1, (attn.num_heads, attn.head_dim)).transpose(1, 2)
    return heads.expand(like.shape[0], -1, -1, -1)


def check_transformer(backbone: nn.Module, name: str = "") -> None:
    """Raise :class:`UserError` unless ``backbone`` is a vision transformer of timm with its usual blocks."""
    model = name or type(backbone).__name__
    needed = "this method tunes a VisionTransformer of timm with its usual blocks; set convnet_type to one, such as "
    needed += "timm:vit_base_patch16_224"
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(backbone).__mro__]  # timm need not be installed
    if "timm.models.vision_transformer.VisionTransformer" not in names:
        raise UserError(f"convnet_type: '{model}' is not a plain vision transformer; {needed}")
    from timm.models.vision_transformer import Attention, Block

    for index, block in enumerate(backbone.blocks):  # pyright: ignore[reportArgumentType]
        usual = type(block) is Block and type(block.attn) is Attention and block.attn.num_heads * block.attn.head_dim
        if usual != backbone.embed_dim:
            raise UserError(f"convnet_type: block {index} of '{model}' is of another kind; {needed}")
