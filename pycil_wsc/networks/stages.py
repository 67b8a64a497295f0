"""The features of each stage of a backbone, for methods that distil them; others do not pay for them."""

import re

from torch import Tensor, nn

from pycil_wsc.errors import UnusableRun, UserError


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages of a backbone from the input on: ``stage1``, ``stage2``, ... of the built-in ones, or those that timm
    names in ``feature_info``. Raises :class:`UserError` if it has none.
    """
    named = dict(backbone.named_modules())
    numbered = [name for name in named if re.fullmatch(r"stage\d+", name)]  # not timm's `stages`, which has all of them
    info = getattr(backbone, "feature_info", None)
    names = numbered or [stage["module"] for stage in (info or ()) if stage["module"] in named]
    if not names:
        raise UserError(
            f"convnet_type: {type(backbone).__name__} has no stages, which this method needs; use a built-in backbone"
        )
    return [named[name] for name in names]


def with_stages(backbone: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(features (B, d), the output of each stage: (B, channels, H, W) or tokens (B, n, channels)) of one forward pass.

    A backbone with a method ``forward_stages``, such as the built-in ones, returns them itself and is compiled in one
    graph. Those of other backbones, such as timm's, are captured by forward hooks, which break torch.compile's graph.

    Raises :class:`UnusableRun` if a stage gives neither a feature map, (B, channels, H, W) or (B, H, W, channels), nor
    tokens (B, n, channels).
    """
    forward_stages = getattr(backbone, "forward_stages", None)
    if forward_stages is not None:
        return forward_stages(images)
    outputs: list[Tensor] = []

    def remember(module, inputs, output):
        outputs.append(output)

    handles = [stage.register_forward_hook(remember) for stage in stages_of(backbone)]
    try:
        features = backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    if not outputs or not all(isinstance(output, Tensor) and output.ndim in (3, 4) for output in outputs):
        raise UnusableRun(
            f"convnet_type: the stages of {type(backbone).__name__} give no maps, which this method needs; use a "
            "built-in backbone"
        )
    return features, [_channels_first(output) for output in outputs]


def _channels_first(stage: Tensor) -> Tensor:
    """(B, H, W, channels) -> (B, channels, H, W); others as they are. Maps are square."""
    last = stage.ndim == 4 and stage.shape[1] == stage.shape[2] != stage.shape[3]
    return stage.permute(0, 3, 1, 2) if last else stage


def tokens_of_last_stage(backbone: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features (B, d), the last stage's output as a list of tokens: (B, tokens, channels))."""
    features, outputs = with_stages(backbone, images)
    last = outputs[-1]
    if last.ndim == 3:  # a vision transformer's, already a list
        return features, last
    return features, last.flatten(2).transpose(1, 2)
