"""The keys of a class-incremental run, each declared once: its type, default, documentation and limits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config.training import TrainingOptions
from pycil_wsc.config.wsc import WSCOptions
from pycil_wsc.data.memory import ALL, ExemplarMemory
from pycil_wsc.keys import (
    FIRST_TASK,
    RECORDED,
    RESULT,
    Key,
    NoOptions,
    declared,
    digest,
    key,
    plain,
    select,
    up_to_date,
)

BACKBONE_OPTION = "convnet_options."  # prefix of the keys that are the backbone's keyword arguments
BACKBONE_KEY = Key("convnet_options", Any, None, "keyword arguments of the backbone", "result", *[None] * 4, choices=())


def in_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a configuration as in a JSON file, where a backbone's option that is a list would be an axis."""
    return {
        name: [value] if name.startswith(BACKBONE_OPTION) and isinstance(value, list) else value
        for name, value in values.items()
    }


@dataclass(frozen=True)
class Config(TrainingOptions):
    """The complete configuration of one run. Learners may have other defaults (``register_learner``)."""

    prefix: str = key("run", "name of the experiment, and of its folder below `out`", decides="name")
    label: str = key("", "name of the method in tables and figures; empty: the learner's name", decides="name")
    dataset: str = key(
        "cifar100", "`cifar100`, `cifar10`, `digits`, `imagenet100`, `npz:PATH` or `folder:PATH`", decides="data"
    )
    tasks: tuple[str, ...] = key(
        (),
        "data sets to learn in this order, one per task, instead of `dataset`, `classes`, `shuffle`, `init_cls` and"
        " `increment`: `folder:PATH` or `npz:PATH`. Classes are identified by name and may recur in later tasks;"
        " a longer list extends a finished run",
        decides="data",
    )
    memory_size: int = key(2000, "total number of exemplars if `fixed_memory` is false", low=0, decides="later tasks")
    memory_per_class: int = key(
        20, 'exemplars per class if `fixed_memory` is true; `"all"` keeps every image', low=0, decides="later tasks"
    )
    fixed_memory: bool = key(
        True,
        "keep `memory_per_class` exemplars of each class; `false`: divide `memory_size` among the classes",
        decides="later tasks",
    )
    memory_bytes: int | None = key(
        None,
        "total size of the exemplars in bytes (of pixels or, on average, of files), instead of the keys above",
        low=0,
        decides="later tasks",
    )
    shuffle: bool = key(True, "shuffle the class order by `seed`, as PyCIL does", decides="data")
    init_cls: int = key(10, "classes of the first task", low=1, decides="data")
    increment: int = key(10, "classes of each later task", low=1, decides="data")
    max_tasks: int | None = key(
        None, "for trials: learn only the first so many tasks; null: all", low=1, decides="later tasks"
    )
    classes: tuple[int | str, ...] = key(
        (), "for trials: learn only these classes of the data set, by number or name; empty: all", decides="data"
    )
    model_name: str = key("wsc", "the learner", decides="later tasks")  # see `plain_first_task`
    consolidate: bool = key(
        False,
        "add Weight Space Consolidation (`wsc.*`) to a learner that trains one network in one phase per task",
        decides="later tasks",
    )
    convnet_type: str = key(
        "resnet32",
        "the backbone: `resnet8`, `resnet20`, `resnet32`, `resnet18`, `resnet18_cifar`, `resnet18_small`, or a timm "
        'model as `timm:NAME`; `convnet_options` holds its keyword arguments, such as `{"width": 32}`',
    )
    device: str = key(
        "auto",
        "`auto` (the machine's accelerator, else the CPU), `cpu`, `cuda`, `mps` or `xpu`, or one with a number "
        "such as `cuda:1`; if PyCIL's list of GPU numbers is given, the first is used",
        decides="rounding",
    )
    seed: int = key(
        1993, "seed of the class order, initial weights, batches, augmentation and exemplars", low=0, high=2**32 - 1
    )

    init_epoch: int = key(200, "epochs of the first task", low=1)
    init_lr: float = key(0.1, "learning rate of the first task", low=0)
    init_milestones: tuple[int, ...] = key(
        (60, 120, 170), "first task: epochs at which the learning rate is multiplied by `init_lr_decay`"
    )
    init_lr_decay: float = key(0.1, "factor at each of `init_milestones`", low=0, high=1)
    init_weight_decay: float = key(5e-4, "weight decay of the first task", low=0)
    epochs: int = key(70, "epochs of each later task", low=1, decides="later tasks")
    lrate: float = key(0.1, "learning rate of later tasks", low=0, decides="later tasks")
    milestones: tuple[int, ...] = key(
        (30, 50), "later tasks: epochs at which the learning rate is multiplied by `lrate_decay`", decides="later tasks"
    )
    lrate_decay: float = key(0.1, "factor at each of `milestones`", low=0, high=1, decides="later tasks")
    weight_decay: float = key(2e-4, "weight decay of later tasks", low=0, decides="later tasks")
    scheduler: str = key(
        "steplr",
        "learning-rate schedule within a task: `steplr` decays at the milestones, `cosine` anneals to `min_lr`",
        choices=("steplr", "cosine"),
    )
    momentum: float = key(0.9, "SGD's momentum", low=0, high=1)
    batch_size: int = key(128, "images in a batch", low=1)
    replay_ratio: float | None = key(
        None,
        "share of current-task images in each batch, the rest being exemplars; null: all are shuffled together",
        low=0,
        high=1,
        decides="later tasks",
    )
    exemplars: str = key(
        "herding",
        "how exemplars are chosen: `herding`, `random` or `reservoir`",
        choices=ExemplarMemory.strategies,
        decides="later tasks",
    )
    validation_split: float = key(
        0.0,
        "share of each class's training samples held out by `seed` and used as test set instead of the original one",
        low=0,
        high=0.5,
    )
    nme: bool = key(
        True,
        "also report nearest-mean-of-exemplars accuracy (one more pass over the memory after each task)",
        decides="later tasks",
    )

    image_size: int | None = key(
        None,
        "side of the network's input images; null: that of the data set or timm model",
        low=8,
        high=4096,
        decides="data",
    )
    cache_images: bool | str = key(
        False,
        "cache image files, resized to the test transform's short side, in `data_root`/resized: as JPEG copies "
        "(`true`), or decoded and mapped into memory (`memory`) or held on the GPU if they fit (`device`)",
        choices=(False, True, "memory", "device"),
    )
    augmentation: str = key(
        "pycil",
        "augmentation of training images: `pycil` (arrays: padded crop and brightness; image files: random resized "
        "crop) or `timm` (random resized crop and RandAugment)",
        choices=("pycil", "timm"),
        decides="data",
    )
    padding: int | None = key(
        None,
        "arrays: zero padding of the random crop; null: as the data set defines",
        low=0,
        high=1024,
        decides="data",
    )
    flip: bool | None = key(
        None, "flip training images horizontally at random; null: as the data set defines", decides="data"
    )
    brightness: float | None = key(
        None,
        "arrays: brightness jitter, factors in 1 +- this value; null: as the data set defines",
        low=0,
        high=10,
        decides="data",
    )

    precision: str = key(
        "auto",
        "`fp32` (on a GPU, with convolutions in TF32, torch's default), `bf16`, or `auto`: bf16 if the CPU or GPU "
        "supports it natively",
        choices=("auto", "fp32", "bf16"),
    )
    deterministic: bool = key(
        False, "on a GPU, use deterministic algorithms: results are equal to the bit; on the CPU they always are"
    )
    sync_batch_norm: bool = key(
        True,
        "`torchrun`: batch norm uses the whole batch, as in a single process; `false`: each process uses its own part",
    )
    timeout_minutes: float = key(
        30.0, "`torchrun`: how long a process waits for the others within a run", low=0.01, decides="speed"
    )
    cuda_graph: bool = key(
        False,
        "on a GPU, launch each step's forward and backward pass as one CUDA graph (not measured yet)",
        decides="rounding",
    )
    num_workers: int = key(4, "processes that decode image files", low=0, high=1024, decides="speed")
    threads: int | None = key(
        None,
        "CPU threads of a run; null: one per core. Small networks are fastest with 1",
        low=1,
        high=1024,
        decides="rounding",
    )
    cache_first_task: bool = key(
        True, "train a first task shared by several runs only once (stored in `out`/first_tasks)", decides="speed"
    )
    data_root: str = key("data", "folder of the data sets", decides="files")
    out: str = key("runs", "folder of the results", decides="files")
    checkpoint_seconds: float = key(
        10.0, "minimum time between checkpoints, which are written at the end of an epoch", low=0, decides="speed"
    )
    save_weights: bool | str = key(
        False,
        'save weights for `pycil_wsc.load`: after the last task (`true`) or after each task (`"every"`)',
        choices=(False, True, "every"),
        decides="files",
    )
    tensorboard: bool = key(
        False, "write the scalars of each epoch and task for TensorBoard (`pip install tensorboard`)", decides="files"
    )
    wandb: bool = key(
        False, "write the same scalars as an offline run of Weights & Biases (`pip install wandb`)", decides="files"
    )
    analyse: tuple[str, ...] = key(
        (), "analyses to record for the report: `gradients`, `drift`, `flatness`, `dormant`", decides="files"
    )
    wsc: WSCOptions = field(default_factory=WSCOptions)
    convnet_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the backbone
    options: Any = NoOptions()  # an instance of the learner's `Options`

    kind = registry.DEFAULT_KIND

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys of this configuration: shared ones, the learner's and the backbone's."""
        return {**keys_of(self.learner), **dict.fromkeys(self._backbone_options(), BACKBONE_KEY)}

    def to_dict(self) -> dict[str, Any]:
        """JSON values by key. Loading them gives this configuration again."""
        values = (
            {name: getattr(self, name) for name in declared(Config)} | vars(self.options) | self._backbone_options()
        )
        if self.learner.consolidates:
            values |= {f"wsc.{name}": value for name, value in vars(self.wsc).items()}
        return plain(values)

    def identity(self) -> dict[str, Any]:
        """The values that decide the result, without a memory key that is unused or follows from the data."""
        skipped = {self._unused_memory_key} - self.learner.also_reads(self)
        skipped |= {"memory_size"} if self.memory_bytes is not None else set()
        values = select(self.to_dict(), self.keys, RESULT)
        return {name: value for name, value in values.items() if name not in skipped}

    def first_task(self) -> dict[str, Any]:
        """The values that decide the first task to the bit, apart from its data and classes."""
        return select(self.to_dict(), self.keys, FIRST_TASK)

    def recorded(self) -> dict[str, Any]:
        """The values that ``result.json`` stores."""
        return select(self.to_dict(), self.keys, RECORDED)

    def continues(self, identity: Mapping[str, Any]) -> bool:
        """Whether the run with this ``identity`` is the same run, or one that learned only the first of its tasks.

        Keys that are missing from ``identity`` have their earlier values.
        """
        own, done = self.identity(), list(identity.get("tasks", []))
        theirs = up_to_date(identity, own, self.keys) | {"tasks": done}
        return own | {"tasks": done} == theirs and own["tasks"][: len(done)] == done

    @property
    def learner(self) -> Any:
        """The learner's class."""
        from pycil_wsc.learners.consolidating import consolidated  # imports torch, which reading results does not need

        learner = registry.learners[self.model_name]
        return consolidated(learner) if self.consolidate else learner

    @property
    def method(self) -> str:
        """The method's name in folder names and tables."""
        return f"{self.model_name}+wsc" if self.consolidate else self.model_name

    @property
    def run_folder(self) -> Path:
        """The folder of the run's files.

        ``<out>/<prefix>/<dataset>-b<init_cls>-inc<increment>/<method>/m<memory>/seed<seed>[-<hash>]``. The hash covers
        the keys that are not at their defaults and not in the folder names. With ``tasks``, to which others may be
        added later, the first one names the folder: ``<task>-tasks``.
        """
        named = {name: getattr(self, name) for name in IN_FOLDER_NAME if name != self._unused_memory_key}
        named["tasks"] = self.tasks[:1]
        kind = registry.kinds[self.kind]
        default = kind.resolve(named).identity() | kind.earlier()  # a changed default does not change folder names
        per_class = "all" if self.memory_per_class == ALL else self.memory_per_class
        memory = f"m{per_class}" if self.fixed_memory else f"total{self.memory_size}"
        memory = memory if self.memory_bytes is None else f"bytes{self.memory_bytes}"
        dataset = re.sub(r"[^\w.]+", "-", self.tasks[0] if self.tasks else self.dataset).strip("-")[-60:]
        split = f"{dataset}-tasks" if self.tasks else f"{dataset}-b{self.init_cls}-inc{self.increment}"
        identity = self.identity() | {"tasks": default["tasks"]}
        return Path(self.out, self.prefix, split, self.method, memory, f"seed{self.seed}{digest(identity, default)}")

    def _backbone_options(self) -> dict[str, Any]:
        return {BACKBONE_OPTION + name: value for name, value in self.convnet_options.items()}

    @property
    def _unused_memory_key(self) -> str:
        """The memory key that ``fixed_memory`` makes ineffective."""
        return "memory_size" if self.fixed_memory else "memory_per_class"


KEYS = MappingProxyType({**declared(Config), **declared(WSCOptions, "wsc.")})  # shared by all learners
INCIDENTAL = frozenset(name for name, key in KEYS.items() if key.decides not in RESULT)
IN_FOLDER_NAME = (
    *("prefix", "dataset", "memory_size", "memory_per_class", "fixed_memory", "memory_bytes"),
    *("init_cls", "increment", "model_name", "consolidate", "seed"),
)


def keys_of(learner: Any) -> Mapping[str, Key]:
    """The keys of runs of a learner class: the shared ones and its own."""
    own = declared(learner.Options)
    if shared := sorted(KEYS.keys() & own.keys()):
        raise ValueError(
            f"{learner.__qualname__}.Options: '{shared[0]}' is a key of all learners; "
            "set its default in register_learner"
        )
    return {**KEYS, **own}
