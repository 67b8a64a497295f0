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
from pycil_wsc.keys import FIRST_TASK, RECORDED, RESULT, Key, NoOptions, declared, digest, key, those

BACKBONE_OPTION = "convnet_options."  # begins the keys that are keyword arguments of the backbone
BACKBONE_KEY = Key("convnet_options", Any, None, "keyword arguments of the backbone", "result", *[None] * 4, choices=())


@dataclass(frozen=True)
class Config(TrainingOptions):
    """Everything that decides one run, and where it runs. Learners may have other defaults (``register_learner``)."""

    prefix: str = key("run", "first folder below `out`: names an experiment", decides="name")
    label: str = key("", "name of the run's method in tables and figures; empty: the learner's", decides="name")
    dataset: str = key(
        "cifar100", "`cifar100`, `cifar10`, `digits`, `imagenet100`, `npz:PATH` or `folder:PATH`", decides="data"
    )
    tasks: tuple[str, ...] = key(
        (),
        "data sets to learn one after another, each as a task, in place of `dataset`, `init_cls` and `increment`:"
        " `folder:PATH`, `npz:PATH`. Classes are label names and may come again; a longer list resumes a finished run",
        decides="data",
    )
    memory_size: int = key(2000, "exemplars in all, when `fixed_memory` is false", low=0, decides="later tasks")
    memory_per_class: int = key(
        20, 'exemplars per class, when `fixed_memory` is true; `"all"` is every image', low=0, decides="later tasks"
    )
    fixed_memory: bool = key(
        True, "keep `memory_per_class` of each class rather than share `memory_size` among them", decides="later tasks"
    )
    shuffle: bool = key(True, "shuffle the class order by `seed`, as PyCIL does", decides="data")
    init_cls: int = key(10, "classes of the first task", low=1, decides="data")
    increment: int = key(10, "classes of each later task", low=1, decides="data")
    max_tasks: int | None = key(
        None, "for trials: learn only so many of the tasks; null: all", low=1, decides="later tasks"
    )
    classes: tuple[int | str, ...] = key(
        (), "for trials: learn only these classes of the data set, by number or name; none: all", decides="data"
    )
    model_name: str = key("wsc", "the learner", decides="later tasks")  # see `plain_first_task`
    consolidate: bool = key(
        False,
        "Weight Space Consolidation (`wsc.*`) on top of a learner that trains one network in one phase per task",
        decides="later tasks",
    )
    convnet_type: str = key(
        "resnet32",
        "the backbone: `resnet8`, `resnet20`, `resnet32`, `resnet18`, `resnet18_cifar`, `resnet18_small`; its keyword "
        'arguments are in `convnet_options`, such as `{"width": 32}`; or `timm:NAME`, a model of timm',
    )
    device: str = key(
        "auto",
        "`auto`, `cpu`, `cuda` or `cuda:N`; of PyCIL's list of GPU numbers the first is used",
        decides="rounding",
    )
    seed: int = key(1993, "class order, initial weights, batches, augmentation and exemplars", low=0, high=2**32 - 1)

    init_epoch: int = key(200, "epochs of the first task", low=1)
    init_lr: float = key(0.1, "learning rate of the first task", low=0)
    init_milestones: tuple[int, ...] = key(
        (60, 120, 170), "first task: epochs at which the rate is multiplied by `init_lr_decay`"
    )
    init_lr_decay: float = key(0.1, "factor at each of `init_milestones`", low=0, high=1)
    init_weight_decay: float = key(5e-4, "weight decay of the first task", low=0)
    epochs: int = key(70, "epochs of each later task", low=1, decides="later tasks")
    lrate: float = key(0.1, "learning rate of later tasks", low=0, decides="later tasks")
    milestones: tuple[int, ...] = key(
        (30, 50), "later tasks: epochs at which the rate is multiplied by `lrate_decay`", decides="later tasks"
    )
    lrate_decay: float = key(0.1, "factor at each of `milestones`", low=0, high=1, decides="later tasks")
    weight_decay: float = key(2e-4, "weight decay of later tasks", low=0, decides="later tasks")
    scheduler: str = key(
        "steplr",
        "the rate within a task: `steplr` falls at the milestones, `cosine` to `min_lr`",
        choices=("steplr", "cosine"),
    )
    momentum: float = key(0.9, "SGD's momentum", low=0, high=1)
    batch_size: int = key(128, "images in a batch", low=1)
    replay_ratio: float | None = key(
        None,
        "share of each batch that the current task has, the rest being exemplars; null: all are shuffled together",
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
        "share of each class's training samples held out by `seed` and tested on in place of the test set",
        low=0,
        high=0.5,
    )
    nme: bool = key(
        True,
        "report nearest-mean-of-exemplars accuracy too (one more pass over the memory after each task)",
        decides="later tasks",
    )

    image_size: int | None = key(
        None,
        "side of the images that the network sees; null: the data set's own, or that of timm's model",
        low=8,
        high=4096,
        decides="data",
    )
    cache_images: bool | str = key(
        False,
        "of image files keep, below `data_root`/resized, with the test transform's short side: JPEG copies (`true`), "
        "or the decoded images, mapped into memory (`memory`) or held on the GPU where they fit (`device`)",
        choices=(False, True, "memory", "device"),
    )
    augmentation: str = key(
        "pycil",
        "of training images: `pycil`, a padded crop and brightness, or `timm`, a crop of any scale and RandAugment",
        choices=("pycil", "timm"),
        decides="data",
    )
    padding: int | None = key(
        None, "zero padding of the random crop; null: the data set's own", low=0, high=1024, decides="data"
    )
    flip: bool | None = key(None, "mirror training images at random; null: the data set's own", decides="data")
    brightness: float | None = key(
        None, "brightness jitter, factor in 1 +- this; null: the data set's own", low=0, high=10, decides="data"
    )

    precision: str = key(
        "auto",
        "`fp32`, `bf16`, or `auto`: bf16 where the processor or GPU computes it natively",
        choices=("auto", "fp32", "bf16"),
    )
    deterministic: bool = key(
        False, "on a GPU use algorithms that give the same numbers each time, to the bit; on the CPU they always do"
    )
    sync_batch_norm: bool = key(
        True,
        "processes of `torchrun`: batch norm sees the whole batch, as one process does; `false`: each its own part",
    )
    timeout_minutes: float = key(
        30.0, "how long a process of `torchrun` waits for the others within a run", low=0.01, decides="speed"
    )
    cuda_graph: bool = key(
        False,
        "on a GPU launch each step's forward and backward pass as one CUDA graph (not measured yet)",
        decides="rounding",
    )
    num_workers: int = key(4, "processes that decode image files", low=0, high=1024, decides="speed")
    threads: int | None = key(
        None,
        "processor threads of a run; null: one for each core. Small networks are best with 1",
        low=1,
        high=1024,
        decides="rounding",
    )
    cache_first_task: bool = key(
        True, "train a first task that several runs share once (kept in `out`/first_tasks)", decides="speed"
    )
    data_root: str = key("data", "folder of the data sets", decides="files")
    out: str = key("runs", "folder of the results", decides="files")
    checkpoint_seconds: float = key(
        10.0, "least time between checkpoints within a task, each at the end of an epoch", low=0, decides="speed"
    )
    save_weights: bool | str = key(
        False,
        'keep the weights for `pycil_wsc.load`: `true` those after the last task, `"every"` those after each',
        choices=(False, True, "every"),
        decides="files",
    )
    tensorboard: bool = key(
        False, "write each epoch's and task's scalars for TensorBoard (`pip install tensorboard`)", decides="files"
    )
    wandb: bool = key(
        False, "write the same scalars as an offline run of Weights & Biases (`pip install wandb`)", decides="files"
    )
    analyse: tuple[str, ...] = key(
        (), "what to record for the report: `gradients`, `drift`, `flatness`, `dormant`", decides="files"
    )
    wsc: WSCOptions = field(default_factory=WSCOptions)
    convnet_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the backbone
    options: Any = NoOptions()  # an instance of the learner's `Options`

    kind = registry.DEFAULT_KIND

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys that this configuration has."""
        return {**keys_of(self.learner), **dict.fromkeys(self._backbone_options(), BACKBONE_KEY)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under the JSON's own names. Loading them gives this configuration again."""
        values = (
            {name: getattr(self, name) for name in declared(Config)} | vars(self.options) | self._backbone_options()
        )
        if self.learner.consolidates:
            values |= {f"wsc.{name}": value for name, value in vars(self.wsc).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """What decides the result: without the memory key that does not count."""
        skipped = {self._other_memory_key} - self.learner.also_reads(self)
        return {name: value for name, value in those(self.to_dict(), self.keys, RESULT).items() if name not in skipped}

    def first_task(self) -> dict[str, Any]:
        """What decides the first task beside its data and classes, to the bit."""
        return those(self.to_dict(), self.keys, FIRST_TASK)

    def recorded(self) -> dict[str, Any]:
        """What ``result.json`` has of the configuration."""
        return those(self.to_dict(), self.keys, RECORDED)

    def continues(self, identity: Mapping[str, Any]) -> bool:
        """Whether a run with this ``identity`` is this one, or learned the first tasks of this one's stream."""
        mine, done = self.identity(), list(identity.get("tasks", []))
        return mine | {"tasks": done} == {**identity, "tasks": done} and mine["tasks"][: len(done)] == done

    @property
    def learner(self) -> Any:
        """The learner's class."""
        from pycil_wsc.learners.consolidating import consolidated  # takes torch, without which results can be read

        learner = registry.learners[self.model_name]
        return consolidated(learner) if self.consolidate else learner

    @property
    def method(self) -> str:
        """The learner's name, as folders and tables have it."""
        return f"{self.model_name}+wsc" if self.consolidate else self.model_name

    @property
    def run_folder(self) -> Path:
        """Where the run's files are: a hash tells apart runs that differ in more than the folder names say.

        ``<out>/<prefix>/<dataset>-b<init_cls>-inc<increment>/<method>/m<memory>/seed<seed>[-<hash>]``; of ``tasks``,
        to which others may be added, the first one names the folder: ``<task>-tasks``.
        """
        told = {name: getattr(self, name) for name in IN_FOLDER_NAME if name != self._other_memory_key}
        told["tasks"] = self.tasks[:1]
        kind = registry.kinds[self.kind]
        usual = kind.resolve(told).identity() | kind.earlier()  # names stay as they were when a default changes
        per_class = "all" if self.memory_per_class == ALL else self.memory_per_class
        memory = f"m{per_class}" if self.fixed_memory else f"total{self.memory_size}"
        dataset = re.sub(r"[^\w.]+", "-", self.tasks[0] if self.tasks else self.dataset).strip("-")[-60:]
        split = f"{dataset}-tasks" if self.tasks else f"{dataset}-b{self.init_cls}-inc{self.increment}"
        identity = self.identity() | {"tasks": usual["tasks"]}
        return Path(self.out, self.prefix, split, self.method, memory, f"seed{self.seed}{digest(identity, usual)}")

    def _backbone_options(self) -> dict[str, Any]:
        return {BACKBONE_OPTION + name: value for name, value in self.convnet_options.items()}

    @property
    def _other_memory_key(self) -> str:
        """The one that does not say how many exemplars there are."""
        return "memory_size" if self.fixed_memory else "memory_per_class"


KEYS = MappingProxyType({**declared(Config), **declared(WSCOptions, "wsc.")})  # that all learners share
INCIDENTAL = frozenset(name for name, key in KEYS.items() if key.decides not in RESULT)
IN_FOLDER_NAME = (
    "prefix",
    "dataset",
    "memory_size",
    "memory_per_class",
    "fixed_memory",
    "init_cls",
    "increment",
    "model_name",
    "consolidate",
    "seed",
)


def keys_of(learner: Any) -> Mapping[str, Key]:
    """The keys of runs of a learner's class: the shared ones and its own."""
    own = declared(learner.Options)
    if both := sorted(KEYS.keys() & own.keys()):
        raise ValueError(
            f"{learner.__qualname__}.Options: '{both[0]}' is a key of all learners; its default is for register_learner"
        )
    return {**KEYS, **own}
