"""The configuration of a class-incremental run: the keys that each subpackage declares, and its own."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pycil_wsc import registry
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.data.data_options import AugmentationOptions, ImageOptions, MemoryOptions, TaskOptions, memory_keys
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.keys import (
    FIRST_TASK,
    RECORDED,
    RESULT,
    Key,
    NoOptions,
    declared,
    key,
    plain,
    select,
    up_to_date,
)
from pycil_wsc.methods.consolidation.wsc_keys import WSCKeys
from pycil_wsc.networks.backbone_options import BackboneOptions
from pycil_wsc.training.learner_config import CONSOLIDATED as CONSOLIDATED
from pycil_wsc.training.learner_config import (
    BudgetOptions,
    DeviceOptions,
    LearnerConfig,
    LearnerOptions,
    OptimizerOptions,
    ScheduleOptions,
)

if TYPE_CHECKING:
    from pycil_wsc.training.learner import BaseLearner

BACKBONE_OPTION = "convnet_options."  # prefix of the keys that are the backbone's keyword arguments
BACKBONE_KEY = Key("convnet_options", None, None, "keyword arguments of the backbone")


def in_file(values: Mapping[str, Json]) -> dict[str, Json]:
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
    evaluate_every: int | None = key(
        None,
        "test also after every so many optimiser steps, and report the area under the curve of these accuracies; null:"
        " after each task only",
        low=1,
        only="experiments",
    )
    seed: int = key(
        1993,
        "seed of the class order, initial weights, batches, augmentation and exemplars",
        low=0,
        high=2**32 - 1,
        names="folder",
        identifies="seed",
        affects="accuracy",
    )
    out: str = key("runs", "folder of the results", decides="files", only="experiments")
    checkpoint_seconds: float = key(
        10.0,
        "minimum time between checkpoints, which are written at the end of an epoch; at least ten times what the last"
        " one took (0: after each epoch)",
        low=0,
        decides="speed",
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
        (),
        "analyses to record for the report: `gradients`, `drift`, `flatness`, `dormant`, `training_accuracy`",
        decides="files",
    )


@dataclass(frozen=True)
class Config(LearnerConfig, RunOptions):
    """The complete configuration of one run. Learners may have other defaults (``register_learner``)."""

    wsc: WSCKeys = field(default_factory=WSCKeys)
    convnet_options: Mapping[str, Json] = field(default_factory=dict)  # keyword arguments of the backbone
    options: Any = NoOptions()  # an instance of the learner's `Options`

    kind: ClassVar[str] = "class_incremental"

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys of this configuration: shared ones, the learner's and the backbone's."""
        return {**keys_of(registry.learners[self.model_name]), **dict.fromkeys(self._backbone_options(), BACKBONE_KEY)}

    def to_dict(self) -> dict[str, Json]:
        """JSON values by key. Loading them gives this configuration again."""
        values = (
            {name: getattr(self, name) for name in declared(Config)} | vars(self.options) | self._backbone_options()
        )
        if self.consolidate or registry.learners[self.model_name].Plan.consolidates:
            values |= {f"wsc.{name}": value for name, value in vars(self.wsc).items()}
        return plain(values)

    def identity(self) -> dict[str, Json]:
        """The values that decide the result, without a memory key that is unused or follows from the data."""
        skipped = {self.memory_keys[0]} - registry.learners[self.model_name].Plan(self).also_reads()
        skipped |= {"memory_size"} if self.memory_bytes is not None else set()
        values = select(self.to_dict(), self.keys, RESULT)
        return {name: value for name, value in values.items() if name not in skipped}

    def first_task(self) -> dict[str, Json]:
        """The values that decide the first task bit for bit, apart from its data and classes."""
        return select(self.to_dict(), self.keys, FIRST_TASK)

    def timed(self) -> dict[str, Json]:
        """The values that decide how long a step takes."""
        keys = self.keys
        values = select(self.to_dict(), self.keys, RECORDED - {"name"})
        return {name: value for name, value in values.items() if keys[name].affects == "time"}

    def recorded(self) -> dict[str, Json]:
        """The values that ``result.json`` stores."""
        return select(self.to_dict(), self.keys, RECORDED)

    def continues(self, identity: Mapping[str, Json]) -> bool:
        """Whether the run with this ``identity`` is the same run, or one that learned only the first of its tasks.

        Keys that are missing from ``identity`` have their earlier values.
        """
        present = self.identity()
        done = list(identity.get("tasks", []))
        recorded = up_to_date(without_dropped(identity), present, self.keys) | {"tasks": done}
        return present | {"tasks": done} == recorded and present["tasks"][: len(done)] == done

    def _backbone_options(self) -> dict[str, Json]:
        return {BACKBONE_OPTION + name: value for name, value in self.convnet_options.items()}

    @property
    def memory_keys(self) -> tuple[str, str]:
        """The memory key that ``fixed_memory`` makes ineffective, and the one that counts."""
        return memory_keys(self.fixed_memory)


GROUPS = {  # as the page of the configuration shows them
    "run": declared(RunOptions),
    "tasks": declared(TaskOptions),
    "memory": declared(MemoryOptions),
    "images": {**declared(ImageOptions), **declared(AugmentationOptions)},
    "backbone": declared(BackboneOptions),
    "method": declared(LearnerOptions),
    "schedule": {**declared(ScheduleOptions), **declared(BudgetOptions)},
    "optimiser": declared(OptimizerOptions),
    "device": declared(DeviceOptions),
    "wsc": declared(WSCKeys, "wsc.", decides="later tasks"),
}
KEYS = MappingProxyType({name: key for group in GROUPS.values() for name, key in group.items()})  # of all learners
INCIDENTAL = frozenset(name for name, key in KEYS.items() if key.decides not in RESULT)


def keys_of(learner: "type[BaseLearner]") -> Mapping[str, Key]:
    """The keys of runs of a learner class: the shared ones and its own."""
    return _keys_with(learner.Options, learner.__qualname__)


@functools.cache
def _keys_with(options: type, learner: str) -> Mapping[str, Key]:
    """The shared keys and those of a learner's ``options``; a sweep asks for them several times for each run."""
    option_keys = declared(options)
    shared = sorted(KEYS.keys() & option_keys.keys())
    if shared:
        raise UserError(
            f"{learner}.Options: '{shared[0]}' is a key of all learners; set its default in register_learner"
        )
    return MappingProxyType({**KEYS, **option_keys})
