"""The keys of the backbone."""

from dataclasses import dataclass

from pycil_wsc.keys import key


@dataclass(frozen=True)
class BackboneOptions:
    """The backbone, beside its own keyword arguments (`convnet_options`)."""

    convnet_type: str = key(
        "resnet32",
        "the backbone: `resnet8`, `resnet20`, `resnet32`, `cosine_resnet32`, `resnet18`, `resnet18_cifar`, "
        "`resnet18_small`, `resnet18_cbam`, `resnet18_rep`, `mlp`, or a timm model as `timm:NAME`; "
        '`convnet_options` holds its keyword arguments, such as `{"width": 32}`',
        fixed=True,
    )
    pretrained: bool | str = key(
        False, "timm models: start from timm's weights (`true`, downloaded), or from a `.safetensors` or `.pth` file"
    )
    grad_checkpointing: bool = key(
        False, "timm models: recompute activations in the backward pass, which saves memory but takes time"
    )
    freeze: tuple[str, ...] = key(
        (), "frozen parts of the backbone, by module or parameter name; `backbone` freezes all of it"
    )
