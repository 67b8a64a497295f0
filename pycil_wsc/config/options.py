"""The configuration of a class-incremental run: the keys that each room declares, and those of the run itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pycil_wsc import registry
from pycil_wsc.config.wsc import WSCKeys, outlived
from pycil_wsc.data.memory import ALL
from pycil_wsc.data.options import AugmentationOptions, ImageOptions, MemoryOptions, TaskOptions
from pycil_wsc.engine.options import DeviceOptions, OptimizerOptions, ScheduleOptions
from pycil_wsc.keys import (
    FIRST_TASK,
    RECORDED,
    RESULT,
    Key,
    NoOptions,
    declared,
    digest,
    having,
    key,
    plain,
    select,
    up_to_date,
)
from pycil_wsc.learners.options import LearnerOptions
from pycil_wsc.networks.options import BackboneOptions

BACKBONE_OPTION = "convnet_options."  # prefix of the keys that are the backbone's keyword arguments
BACKBONE_KEY = Key("convnet_options", Any, None, "keyword arguments of the backbone")


def in_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a configuration as in a JSON file, where a backbone's option that is a list would be an axis."""
    return {
        name: [value] if name.startswith(BACKBONE_OPTION) and isinstance(value, list) else value
        for name, value in values.items()
    }


@dataclass(frozen=True)
class RunOptions:
    """A run: its name, its seed, and what it writes."""

    prefix: str = key(
        "run",
        "name of the experiment, and of its folder below `out`",
        decides="name",
        names="folder",
        only="experiments",
    )
    label: str = key(
        "", "name of the method in tables and figures; empty: the learner's name", decides="name", only="experiments"
    )
    seed: int = key(
        1993,
        "seed of the class order, initial weights, batches, augmentation and exemplars",
        low=0,
        high=2**32 - 1,
        names="folder",
        affects="accuracy",
    )
    out: str = key("runs", "folder of the results", decides="files", only="experiments")
    checkpoint_seconds: float = key(
        10.0, "minimum time between checkpoints, which are written at the end of an epoch", low=0, decides="speed"
    )
    cache_first_task: bool = key(
        True,
        "train a first task shared by several runs only once (stored in `out`/first_tasks)",
        decides="speed",
        only="experiments",
    )
    save_weights: bool | str = key(
        False,
        'save weights for `pycil_wsc.load`: after the last task (`true`) or after each task (`"every"`)',
        choices=(False, True, "every"),
        decides="files",
        only="experiments",
    )
    tensorboard: bool = key(
        False,
        "write the scalars of each epoch and task for TensorBoard (`pip install tensorboard`)",
        decides="files",
        only="experiments",
    )
    wandb: bool = key(
        False,
        "write the same scalars as an offline run of Weights & Biases (`pip install wandb`)",
        decides="files",
        only="experiments",
    )
    analyse: tuple[str, ...] = key(
        (), "analyses to record for the report: `gradients`, `drift`, `flatness`, `dormant`", decides="files"
    )


@dataclass(frozen=True)
class Config(
    DeviceOptions,
    OptimizerOptions,
    ScheduleOptions,
    LearnerOptions,
    BackboneOptions,
    AugmentationOptions,
    ImageOptions,
    MemoryOptions,
    TaskOptions,
    RunOptions,
):
    """The complete configuration of one run. Learners may have other defaults (``register_learner``)."""

    wsc: WSCKeys = field(default_factory=WSCKeys)
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
        skipped = {self.memory_keys[0]} - self.learner.also_reads(self)
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
        recorded = {name: value for name, value in identity.items() if not outlived(name, value)}
        theirs = up_to_date(recorded, own, self.keys) | {"tasks": done}
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
        named = {name: getattr(self, name) for name in having(KEYS, names="folder") if name != self.memory_keys[0]}
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
    def memory_keys(self) -> tuple[str, str]:
        """The memory key that ``fixed_memory`` makes ineffective, and the one that counts."""
        return ("memory_size", "memory_per_class") if self.fixed_memory else ("memory_per_class", "memory_size")


GROUPS = {  # as the page of the configuration shows them
    "run": declared(RunOptions),
    "tasks": declared(TaskOptions),
    "memory": declared(MemoryOptions),
    "images": {**declared(ImageOptions), **declared(AugmentationOptions)},
    "backbone": declared(BackboneOptions),
    "method": declared(LearnerOptions),
    "schedule": declared(ScheduleOptions),
    "optimiser": declared(OptimizerOptions),
    "device": declared(DeviceOptions),
    "wsc": declared(WSCKeys, "wsc.", decides="later tasks"),
}
KEYS = MappingProxyType({name: key for group in GROUPS.values() for name, key in group.items()})  # of all learners
INCIDENTAL = frozenset(name for name, key in KEYS.items() if key.decides not in RESULT)


def keys_of(learner: Any) -> Mapping[str, Key]:
    """The keys of runs of a learner class: the shared ones and its own."""
    own = declared(learner.Options)
    if shared := sorted(KEYS.keys() & own.keys()):
        raise ValueError(
            f"{learner.__qualname__}.Options: '{shared[0]}' is a key of all learners; "
            "set its default in register_learner"
        )
    return {**KEYS, **own}
