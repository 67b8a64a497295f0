"""The features of each stage of a backbone, for methods that distil them; others do not pay for them."""

from typing import Any

from torch import Tensor, nn

from pycil_wsc.errors import UserError


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages of a backbone from the input on: ``stage1``, ``stage2``, ... of the built-in ones, or those that timm
    names in ``feature_info``. Raises :class:`UserError` if it has none.
    """
    named = dict(backbone.named_modules())
    own = [name for name in named if name.startswith("stage") and "." not in name]
    info: Any = getattr(backbone, "feature_info", None)
    names = own or [each["module"] for each in (info or ()) if each["module"] in named]
    if not names:
        raise UserError(
            f"convnet_type: {type(backbone).__name__} has no stages, which this method needs; use a built-in backbone"
        )
    return [named[name] for name in names]


def with_stages(backbone: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(features (B, d), the output of each stage: (B, channels, H, W)), by one forward pass."""
    outputs: list[Tensor] = []

    def remember(module, inputs, output):
        outputs.append(output)

    handles = [stage.register_forward_hook(remember) for stage in stages_of(backbone)]
    try:
        features = backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    return features, outputs
