"""The keys of training, which all learners share; their defaults reproduce PyCIL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pycil_wsc.data.data_options import DataOptions
from pycil_wsc.keys import key
from pycil_wsc.networks.backbone_options import BackboneOptions

CONSOLIDATED = "+wsc"  # ends the names of methods to which Weight Space Consolidation was added


@dataclass(frozen=True)
class ScheduleOptions:
    """Epochs and learning rates of the first task (`init_*`) and of later ones."""

    online: bool = key(
        False,
        "one pass: each image is seen once. Defaults are then batches of 10, and a constant learning rate without"
        " momentum or weight decay ([Streams and domains](streams.md#one-pass))",
        sets_defaults=True,
    )
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
        "have graphs",
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
class LearnerOptions:
    """The method, its batches and its tests."""

    model_name: str = key(
        "wsc", "the learner", decides="later tasks", names="folder", identifies="method", only="experiments"
    )  # see `plain_first_task`
    consolidate: bool = key(
        False,
        "add Weight Space Consolidation (`wsc.*`) to a learner that trains in one phase per task",
        decides="later tasks",
        names="folder",
        identifies="method",
        fixed=True,
    )
    batch_size: int = key(128, "images in a batch", low=1)
    replay_ratio: float | None = key(
        None,
        "fraction of current-task images in each batch, the rest being exemplars; null: all are shuffled together",
        low=0,
        high=1,
        decides="later tasks",
    )
    batch_seed: int | None = key(
        None,
        "seed of the order and augmentation of batches in all tasks but the first, to see how much these change alone; "
        "null: `seed`",
        low=0,
        high=2**32 - 1,
        decides="later tasks",
        affects="accuracy",
        by_method=True,
    )
    steps_per_batch: int = key(
        1,
        "with `memory_update` `step`: optimiser steps on each batch, each with newly drawn exemplars; the batch enters "
        "the memory after the last",
        low=1,
    )
    head: str | None = key(
        None,
        "logits of the network: those of the classes `seen` so far, or `all` that the run will learn, as in Mammoth; "
        "null: `all` with `memory_update` `step`, else `seen`",
        choices=(None, "seen", "all"),
    )
    label_smoothing: float = key(
        0.0,
        "fraction of each target that the cross-entropy spreads evenly over the classes",
        low=0,
        below=1,
    )
    class_balance: str = key(
        "none",
        "for classes of unequal size: `sampler` draws each class equally often, exemplars included, in an epoch of the "
        "same length; `weights` gives each image in the loss a weight inverse to the size of its class",
        choices=("none", "sampler", "weights"),
    )
    nme: bool = key(
        True,
        "also report nearest-mean-of-exemplars accuracy (one more pass over the memory after each task)",
        decides="later tasks",
        affects="accuracy",
        by_method=True,
    )

    @property
    def method(self) -> str:
        """The method's name in folder names and tables."""
        return self.model_name + CONSOLIDATED if self.consolidate else self.model_name


Costs = dict[str, float | list[int] | list[int | None]]  # name -> cost of a run; a list has a number for each task


class LearnerConfig(
    DeviceOptions,
    OptimizerOptions,
    ScheduleOptions,
    BudgetOptions,
    LearnerOptions,
    BackboneOptions,
    DataOptions,
):
    """What a learner reads of a run's configuration: the keys of the subpackages it uses, and these.

    The configuration itself (:class:`pycil_wsc.config.image_config.Config`) declares the keys of the run, too.
    """

    wsc: Any  # the options of Weight Space Consolidation, declared by `config`
    convnet_options: Mapping[str, object]  # keyword arguments of the backbone
    options: Any  # an instance of the learner's `Options`

    @property
    def by_step(self) -> bool:
        """Whether training steps fill the memory."""
        return self.memory_update == "step"

    @property
    def whole_head(self) -> bool:
        """Whether the network has logits of all classes of the run from the first task on."""
        return self.by_step if self.head is None else self.head == "all"
