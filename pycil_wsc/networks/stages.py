"""The features of each stage of a backbone, for methods that distil them; others do not pay for them."""

from torch import Tensor, nn

from pycil_wsc.errors import UserError


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages of a backbone from the input on: ``stage1``, ``stage2``, ... of the built-in ones, or those that timm
    names in ``feature_info``. Raises :class:`UserError` if it has none.
    """
    named = dict(backbone.named_modules())
    own = [name for name in named if name.startswith("stage") and "." not in name]
    info = getattr(backbone, "feature_info", None)
    names = own or [each["module"] for each in (info or ()) if each["module"] in named]
    if not names:
        raise UserError(
            f"convnet_type: {type(backbone).__name__} has no stages, which this method needs; use a built-in backbone"
        )
    return [named[name] for name in names]


def with_stages(backbone: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(features (B, d), the output of each stage: (B, channels, H, W)), by one forward pass.

    A backbone with a method ``forward_stages`` gives them itself, as the built-in ones do; this can be compiled in one
    graph. The outputs of other backbones, as timm's, are caught by hooks, at which torch.compile parts the graph.
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
    return features, outputs


def tokens_of_last_stage(backbone: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features (B, d), the last stage's output as a list of places: (B, places, channels))."""
    features, outputs = with_stages(backbone, images)
    last = outputs[-1]
    if last.ndim == 3:  # a vision transformer's, already a list
        return features, last
    if last.shape[1] == last.shape[2] != last.shape[3]:  # channels last
        return features, last.flatten(1, 2)
    return features, last.flatten(2).transpose(1, 2)
