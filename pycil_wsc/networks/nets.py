"""Networks whose heads grow with the tasks, some of which also add backbones."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from pycil_wsc.errors import UserError, first_line
from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.timm_models import is_timm, timm_backbone
from pycil_wsc.registry import backbones, check_backbone_options


class Backbone(nn.Module):
    """The type of backbones, whether or not they are derived from it: (B, 3, H, W) -> (B, ``out_dim``) features."""

    out_dim: int
    split: Callable[[], tuple[nn.Module, nn.Module]]  # only of backbones that MEMO can use


def make_backbone(
    name: str,
    options: Mapping[str, object] = MappingProxyType({}),
    pretrained: bool | str = False,
    image_size: int | None = None,
    grad_checkpointing: bool = False,
) -> Backbone:
    """The backbone ``name`` with the keyword arguments ``options``. Raises :class:`UserError` if these are wrong.

    The others are arguments for timm's models, see :func:`~.timm_models.timm_backbone`.
    """
    if is_timm(name):
        return cast(Backbone, timm_backbone(name, options, pretrained, image_size, grad_checkpointing))
    check_backbone_options(name, options)
    try:
        return backbones[name](**options)
    except ValueError as error:
        raise UserError(f"convnet_options of '{name}': {first_line(error)}") from None
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:  # torch cannot allocate the weights
        remedy = "correct them, or choose a smaller network"
        raise UserError(f"convnet_options of '{name}': {first_line(error)}; {remedy}") from None


def check_features(backbone: nn.Module, image_size: int, name: str) -> None:
    """Raise :class:`UserError` unless ``backbone``, called ``name``, gives (1, ``out_dim``) features for an image.

    The image is black, of side ``image_size``. ``backbone`` is in evaluation mode afterwards, with the same weights
    and statistics.
    """
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # whatever its modules raise
        raise UserError(
            f"convnet_type: '{name}' cannot process an image of side {image_size} ({first_line(error)}); "
            "correct convnet_options or image_size, or choose another model"
        ) from None
    if not hasattr(backbone, "out_dim"):
        raise UserError(f"convnet_type: '{name}' has no attribute out_dim; set it to the number of features")
    given = f"features of shape {tuple(features.shape)}" if torch.is_tensor(features) else type(features).__name__
    wanted = f"features of shape {(1, backbone.out_dim)}"
    if given != wanted:
        raise UserError(
            f"convnet_type: '{name}' gives {given} for one image, not {wanted}; "
            "correct convnet_options or the module, or choose another model"
        )


class IncrementalNet(nn.Module):
    """A backbone and a head with a row for each class seen: (B, 3, H, W) -> (B, classes) logits."""

    def __init__(self, backbone: Backbone, head: Callable[[int], nn.Module] = IncrementalHead):
        super().__init__()
        self.backbone = backbone
        self.head: Any = head(self.backbone.out_dim)

    def train(self, mode: bool = True) -> "IncrementalNet":
        super().train(mode)
        layers.eval_frozen(self)
        return self

    def grow(self, num_classes: int) -> None:
        self.head.grow(num_classes)

    def first_parts(self) -> list[nn.Module]:
        """The modules that the first task trains, in the same order for every network: parts of the backbone, head."""
        return [self.backbone, self.head]

    def depths(self) -> dict[nn.Parameter, int]:
        """The distance of each parameter of the backbone from the head, in layers; without the head's parameters."""
        return layers.depths([self.backbone])

    def extract(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d) features."""
        return self.backbone(images)

    def classify(self, features: Tensor) -> Tensor:
        """(B, d) features -> (B, classes) logits."""
        return self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.extract(images))


class BiasCorrectedNet(IncrementalNet):
    """Adds a learned scale and shift of the logits of each task, initially 1 and 0 (Wu et al., 2019)."""

    def __init__(self, backbone: Backbone):
        super().__init__(backbone)
        self.corrections = nn.ParameterList()  # (2,) for each task: scale, shift
        self.sizes: list[int] = []

    def grow(self, num_classes: int) -> None:
        self.sizes.append(num_classes - self.head.out_features)
        super().grow(num_classes)
        self.corrections.append(nn.Parameter(torch.tensor([1.0, 0.0])))

    def classify(self, features: Tensor) -> Tensor:
        parts = self.head(features).float().split(self.sizes, 1)
        return torch.cat([scale * part + shift for part, (scale, shift) in zip(parts, self.corrections)], 1)


class ExpandingNet(nn.Module):
    """A shared trunk, a new block for each task, a head over all features and an auxiliary head over the newest block.

    Without ``share_trunk`` a block is a whole backbone (DER, FOSTER); with it, only the last stage of the backbone
    (MEMO). A new block starts as a copy of the previous one. From the second task on, a frozen trunk and frozen old
    blocks stay in evaluation mode.
    """

    made_anew: tuple[str, ...] = ("aux_head",)  # names of the parts that each task begins with new weights

    def __init__(self, backbone: Backbone, share_trunk: bool = False):
        super().__init__()
        self.out_dim: int = backbone.out_dim  # features of one block
        depths = layers.depths([backbone]) if share_trunk else {}
        self.trunk, block = backbone.split() if share_trunk else (nn.Identity(), backbone)
        parameters = [*self.trunk.parameters(), *block.parameters()]
        self.split_depths = [depths[p] for p in parameters] if depths.keys() >= set(parameters) else None
        self.blocks = nn.ModuleList([block])
        self.head = IncrementalHead(self.out_dim)
        self.aux_head: IncrementalHead | None = None

    def grow(self, num_classes: int, aux_classes: int) -> None:
        """Grow to ``num_classes`` in total, with a new block unless it is the first task, and a new auxiliary head."""
        if self.head.out_features:
            self.blocks.append(copy.deepcopy(self.blocks[-1]).requires_grad_(True))
        self.head.grow(num_classes, self.out_dim * len(self.blocks))
        self.aux_head = IncrementalHead(self.out_dim, aux_classes)

    def first_parts(self) -> list[nn.Module]:
        return [self.trunk, self.blocks[0], self.head]

    def depths(self) -> dict[nn.Parameter, int]:
        """The distance of each parameter of trunk and blocks from the heads, in layers; without those of the heads."""
        distances = {}
        for block in self.blocks:
            if self.split_depths is None:
                distances |= layers.depths([self.trunk, block])
            else:
                distances |= dict(zip([*self.trunk.parameters(), *block.parameters()], self.split_depths))
        return distances

    def extract(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, blocks x d) features, from the oldest block to the newest."""
        shared = self.trunk(images)
        return torch.cat([block(shared) for block in self.blocks], 1)

    def classify(self, features: Tensor) -> Tensor:
        """Features -> (B, classes) logits."""
        return self.head(features)

    def classify_newest(self, features: Tensor) -> Tensor:
        """Features -> (B, aux_classes) logits from the features of the newest block."""
        assert self.aux_head is not None
        return self.aux_head(features[:, -self.out_dim :])

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.extract(images))

    def train(self, mode: bool = True) -> "ExpandingNet":
        super().train(mode)
        for part in [self.trunk, *self.blocks[:-1]] if len(self.blocks) > 1 else []:
            part.train(mode and any(p.requires_grad for p in part.parameters()))
        layers.eval_frozen(self)
        return self


def inner_units(network: nn.Module) -> list[tuple[str, str, str]]:
    """Names of (layer, batch norm, next layer) for units with one incoming and one outgoing layer.

    In a residual network, these are inside the basic blocks; in pre-activation blocks, whose ``bn1`` normalises the
    input, there are none.
    """
    inner = ["conv1", "bn1", "conv2"]
    return [
        (f"{place}.conv1", f"{place}.bn1", f"{place}.conv2")
        for place, module in network.named_modules()
        if [name for name, _ in module.named_children() if name in inner] == inner
    ]
