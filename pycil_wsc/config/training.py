"""The keys of how a network is trained beyond PyCIL's: the optimiser, its rates, and what does not learn."""

from dataclasses import dataclass

from pycil_wsc.keys import key


@dataclass(frozen=True)
class TrainingOptions:
    """What PyCIL has no keys for. The defaults are what it does."""

    pretrained: bool | str = key(
        False, "timm's models: start from timm's weights (`true`, downloaded), or from a `.safetensors` or `.pth` file"
    )
    grad_checkpointing: bool = key(
        False, "timm's models: compute activations anew in the backward pass, which takes time and saves memory"
    )
    channels_last: bool = key(
        True, "keep weights and activations of convolutions in the channels-last format", decides="rounding"
    )
    optimizer: str = key("sgd", "`sgd`, or `adamw`; torch's fused ones")
    betas: tuple[float, ...] = key((0.9, 0.999), "AdamW's decay of the first and second moment", low=0, below=1)
    clip_norm: float | None = key(
        None, "gradients of a greater total norm are scaled down to it before each step; null: never", above=0
    )
    label_smoothing: float = key(
        0.0,
        "share of each target that the cross-entropy spreads evenly over the classes",
        low=0,
        below=1,
    )
    warmup_epochs: int = key(0, "epochs of each task in which the rate rises linearly from 0", low=0)
    min_lr: float = key(0.0, "the rate at which `cosine` ends", low=0)
    schedule_unit: str = key(
        "epoch", "how often the rate changes: each `epoch` or `iteration`", choices=("epoch", "iteration")
    )
    backbone_lr_factor: float = key(1.0, "the backbone's rate as a multiple of the head's", low=0)
    layer_decay: float = key(
        1.0, "factor of the rate from each layer of the backbone to the one before it, the last one included", above=0
    )
    freeze: tuple[str, ...] = key(
        (),
        "parts of the backbone that do not learn, by the names of modules or parameters; `backbone` is all of it",
    )
