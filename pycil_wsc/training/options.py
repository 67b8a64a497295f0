"""The keys of the training loop. The defaults reproduce PyCIL."""

from dataclasses import dataclass

from pycil_wsc.keys import key


@dataclass(frozen=True)
class ScheduleOptions:
    """Epochs and learning rates of the first task (`init_*`) and of later ones."""

    init_epoch: int = key(200, "epochs of the first task", low=1, like="epochs", by_method=True)
    init_lr: float = key(0.1, "learning rate of the first task", low=0, affects="accuracy", like="lrate")
    init_milestones: tuple[int, ...] = key(
        (60, 120, 170),
        "first task: epochs at which the learning rate is multiplied by `init_lr_decay`",
        affects="accuracy",
        by_method=True,
        like="milestones",
        within="init_epoch",
    )
    init_lr_decay: float = key(
        0.1, "factor at each of `init_milestones`", low=0, high=1, affects="accuracy", like="lrate_decay"
    )
    init_weight_decay: float = key(
        5e-4, "weight decay of the first task", low=0, affects="accuracy", by_method=True, like="weight_decay"
    )
    epochs: int = key(70, "epochs of each later task", low=1, decides="later tasks", by_method=True)
    lrate: float = key(0.1, "learning rate of later tasks", low=0, decides="later tasks", affects="accuracy")
    milestones: tuple[int, ...] = key(
        (30, 50),
        "later tasks: epochs at which the learning rate is multiplied by `lrate_decay`",
        decides="later tasks",
        affects="accuracy",
        by_method=True,
        within="epochs",
    )
    lrate_decay: float = key(
        0.1, "factor at each of `milestones`", low=0, high=1, decides="later tasks", affects="accuracy"
    )
    weight_decay: float = key(
        2e-4, "weight decay of later tasks", low=0, decides="later tasks", affects="accuracy", by_method=True
    )
    scheduler: str = key(
        "steplr",
        "learning-rate schedule within a task: `steplr` decays at the milestones, `cosine` anneals to `min_lr`, "
        "`restarts` trains one epoch at a tenth of the learning rate, then anneals, with warm restarts, in cycles of "
        "1, 2, 4, ... epochs",
        choices=("steplr", "cosine", "restarts"),
        affects="accuracy",
        by_method=True,
    )
    warmup_epochs: int = key(
        0, "epochs at the start of each task in which the learning rate rises linearly from 0", low=0
    )
    min_lr: float = key(0.0, "final learning rate of `cosine` and of each cycle of `restarts`", low=0)
    schedule_unit: str = key(
        "epoch", "how often the learning rate changes: each `epoch` or `iteration`", choices=("epoch", "iteration")
    )


@dataclass(frozen=True)
class BudgetOptions:
    """What a task may spend; `budget` sets it."""

    operations_like: str | None = key(
        None,
        "end each task after as many floating-point operations as this method would use; null: after its epochs. Set "
        "by `budget`",
        choices=(None, "replay"),
    )


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimiser, and what it is applied to."""

    optimizer: str = key("sgd", "`sgd`, `adam` or `adamw`, in torch's fused implementation", sets_defaults=True)
    momentum: float = key(0.9, "SGD's momentum", low=0, high=1, affects="accuracy")
    betas: tuple[float, ...] = key((0.9, 0.999), "decay of Adam's and AdamW's first and second moments", low=0, below=1)
    clip_norm: float | None = key(
        None, "clip the total norm of the gradients to this value before each step; null: no clipping", above=0
    )
    backbone_lr_factor: float = key(1.0, "the backbone's learning rate as a multiple of the head's", low=0)
    layer_decay: float = key(
        1.0, "the learning rate `n` layers below the head is multiplied by the `n`-th power of this value", above=0
    )


@dataclass(frozen=True)
class DeviceOptions:
    """Devices, precision and processes."""

    device: str = key(
        "auto",
        "`auto` (the machine's accelerator, else the CPU), `cpu`, `cuda`, `mps` or `xpu`, or one with a number "
        "such as `cuda:1`; if PyCIL's list of GPU numbers is given, the first is used",
        decides="rounding",
    )
    threads: int | None = key(
        None,
        "CPU threads of a run; null: one per core. Small networks are fastest with 1",
        low=1,
        high=1024,
        decides="rounding",
    )
    precision: str = key(
        "auto",
        "`fp32` (on a GPU, with convolutions in TF32, torch's default), `bf16`, or `auto`: bf16 if the CPU or GPU "
        "supports it natively",
        choices=("auto", "fp32", "bf16"),
    )
    channels_last: bool = key(
        True, "channels-last memory format for the weights and activations of convolutions", decides="rounding"
    )
    deterministic: bool = key(False, "on a GPU, use deterministic algorithms: results are bit-identical, as on the CPU")
    compile: bool | str = key(
        False,
        "compile each phase's loss with `torch.compile`; `reduce-overhead` also launches it as a graph on devices that "
        "have graphs. Not measured on a GPU yet",
        choices=(False, True, "reduce-overhead"),
        decides="rounding",
    )
    batch_norm_parts: int = key(
        1,
        "in training, batch norm normalises this many equal parts of a batch separately, as PyCIL does on as many "
        "GPUs; 1: the whole batch",
        low=1,
        high=1024,
    )
    timeout_minutes: float = key(
        30.0, "`torchrun`: how long a process waits for the others within a run", low=0.01, high=10_080, decides="speed"
    )


@dataclass(frozen=True)
class TriggerOptions:
    """What ends the warm-up of a consolidation."""

    trigger: str = key(
        "warmup",
        "what ends the warm-up: a fraction of the epochs (`warmup`), or a plateau of the `training_loss` or of the loss"
        " on `held_out` exemplars; without a plateau the task is trained as by Replay",
        choices=("warmup", "training_loss", "held_out"),
        decides="later tasks",
    )
    patience: int = key(3, "a plateau is this many epochs without a new lowest loss", low=1, decides="later tasks")
    held_out: float = key(
        0.1,
        "`held_out`: fraction of each class's exemplars excluded from training, at least one",
        low=0,
        high=0.5,
        decides="later tasks",
    )
