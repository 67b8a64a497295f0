"""The keys that all learners share; a learner's own are those of its `Options`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pycil_wsc.data.options import DataOptions
from pycil_wsc.keys import key
from pycil_wsc.networks.options import BackboneOptions
from pycil_wsc.training.options import BudgetOptions, DeviceOptions, OptimizerOptions, ScheduleOptions

CONSOLIDATED = "+wsc"  # ends the names of methods to which Weight Space Consolidation was added


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
        "with `memory_update` `step`: optimiser steps on each batch, each with exemplars drawn anew; the batch enters "
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

    The configuration itself (:class:`pycil_wsc.config.options.Config`) declares the keys of the run, too.
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
