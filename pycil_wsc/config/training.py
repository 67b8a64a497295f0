"""Training keys that PyCIL does not have: the optimiser, learning rates and frozen parts."""

from dataclasses import dataclass

from pycil_wsc.keys import key


@dataclass(frozen=True)
class TrainingOptions:
    """Training options that PyCIL does not have. The defaults reproduce PyCIL."""

    pretrained: bool | str = key(
        False, "timm models: start from timm's weights (`true`, downloaded), or from a `.safetensors` or `.pth` file"
    )
    grad_checkpointing: bool = key(
        False, "timm models: recompute activations in the backward pass, which saves memory but takes time"
    )
    channels_last: bool = key(
        True, "channels-last memory format for the weights and activations of convolutions", decides="rounding"
    )
    optimizer: str = key("sgd", "`sgd` or `adamw`, in torch's fused implementation")
    betas: tuple[float, ...] = key((0.9, 0.999), "AdamW's decay of the first and second moments", low=0, below=1)
    clip_norm: float | None = key(
        None, "clip the total norm of the gradients to this value before each step; null: no clipping", above=0
    )
    label_smoothing: float = key(
        0.0,
        "share of each target that the cross-entropy spreads evenly over the classes",
        low=0,
        below=1,
    )
    warmup_epochs: int = key(
        0, "epochs at the start of each task in which the learning rate rises linearly from 0", low=0
    )
    min_lr: float = key(0.0, "final learning rate of `cosine`", low=0)
    schedule_unit: str = key(
        "epoch", "how often the learning rate changes: each `epoch` or `iteration`", choices=("epoch", "iteration")
    )
    backbone_lr_factor: float = key(1.0, "the backbone's learning rate as a multiple of the head's", low=0)
    layer_decay: float = key(
        1.0, "the learning rate `n` layers below the head is multiplied by the `n`-th power of this value", above=0
    )
    freeze: tuple[str, ...] = key(
        (), "frozen parts of the backbone, by module or parameter name; `backbone` freezes all of it"
    )
