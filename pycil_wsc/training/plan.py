"""What is known of a method before it has a network: facts about it, and what follows from a run's configuration."""

from collections.abc import Sequence

import numpy as np
from torch import nn

from pycil_wsc.data.batches.epoch_order import epoch_order
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.networks.tuning.transformer import check_transformer
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.replay_plan import Draw, draw_sizes, planned_images, seed_of


class Plan:
    """What a method declares of itself: a nested class of a learner, derived from that of the learner's base::

        class Reservoir(Replay):
            class Plan(Replay.Plan):
                needs_exemplars = True

    A run asks it before anything is trained: ``Reservoir.Plan(config).planned_epochs(task)``. A learner has its own as
    ``self.plan``. One with several bases has a plan derived from all of theirs.

    Args:
        config: the configuration, whose ``options`` has the method's own keys.

    Attributes:
        uses_memory: whether the method keeps exemplars.
        needs_exemplars: whether it would be another method without exemplars; they are then required.
        chooses_first: whether the exemplars of a task are chosen before it is trained.
        starts_anew: whether each task begins with new initial weights.
        mixes: whether its batches follow ``replay_ratio``.
        needs_new_classes: whether it cannot learn a task that brings only new images of known classes.
        averages: whether it averages the weights itself, so that it cannot be consolidated.
        memory_updates: the values of ``memory_update`` that it can do; the first one is its default.
        task_free: whether it needs no task identity with "step", so that tasks may share classes (``blurry``).
        fills_by_step: with "step", whether each step fills the memory, and not the method itself.
        ring: with "step", whether the memory is a ring for each task, whatever ``exemplars`` says.
        any_head: whether the key ``head`` may be "all" with "task" too.
        one_phase: whether each task trains one network in one phase, as consolidation requires.
        expands: whether its network grows with the tasks, or doubles; the report marks it with †.
        grows_at_once: whether its network depends on the number of classes alone, not on the tasks that brought them.
        consolidates: whether Weight Space Consolidation is a part of it.
        measures_quotas: whether the numbers of exemplars depend on the trained network, so that a run plans again.
        tunes: whether it tunes a vision transformer of timm from outside, which ``convnet_type`` must then be.
        plain_first_task: whether the first task is plain cross-entropy, so that learners may share its trained weights.
        epoch_keys: the keys whose sum is the number of epochs of a later task.
        own_schedules: of these, the keys of phases whose learning rate has a schedule of its own.
        over_features: of these, the keys of phases that train on features; a budget leaves them as they are.
    """

    uses_memory: bool = True
    needs_exemplars: bool = False
    chooses_first: bool = False
    starts_anew: bool = False
    mixes: bool = True
    needs_new_classes: bool = False
    averages: bool = False
    memory_updates: tuple[str, ...] = ("task",)
    task_free: bool = False
    fills_by_step: bool = True
    ring: bool = False
    any_head: bool = False
    one_phase: bool = True
    expands: bool = False
    grows_at_once: bool = False
    consolidates: bool = False
    measures_quotas: bool = False
    tunes: bool = False
    plain_first_task: bool = False
    epoch_keys: tuple[str, ...] = ("epochs",)
    own_schedules: tuple[str, ...] = ()
    over_features: tuple[str, ...] = ()

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config

    def check(self) -> str | None:
        """One line that says what is wrong with the method's own options, or None."""

    def check_backbone(self, backbone: nn.Module) -> None:
        """Raise :class:`UserError` if the method cannot use ``backbone``. Called before anything is trained."""
        if self.tunes:
            check_transformer(backbone, self.config.convnet_type)

    def time_constants(self, network: nn.Module) -> dict[str, float]:
        """Keys that need time: {key: the optimiser steps within a task until its value takes effect} in ``network``.

        A run says in one line, before it trains, which of them are longer than its tasks.
        """
        return {}

    def also_reads(self) -> set[str]:
        """Which of ``memory_size`` and ``memory_per_class`` the method reads whatever ``fixed_memory`` is."""
        return set()

    def new_samples(self, task: Task, targets: np.ndarray) -> np.ndarray:
        """The samples of the task that it trains on, by default all: (n,). The same at each call; may have repeats.

        ``targets``: (N,), the classes of the whole training set.
        """
        return task.train_indices

    def planned_epochs(self, task: Task) -> int:
        """The number of epochs of a task, for the cost that ``--dry-run`` prints."""
        values = vars(self.config) | vars(self.config.options)
        return sum(values[key] for key in self.epoch_keys) if task.index else self.config.init_epoch

    def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
        """The images that the task trains on, over all epochs, with the exemplars in ``memory``. A run checks this.

        ``targets``: (N,), the classes of the whole training set.
        """
        epochs = self.planned_epochs(task)
        samples = self.new_samples(task, targets)
        if not isinstance(memory, StreamMemory):
            return epochs * (len(samples) + len(memory))
        config = self.config
        seeds = [seed_of(config, "batches", task.index, 0, epoch) for epoch in range(epochs)]
        orders = (targets[epoch_order(samples, True, seed)] for seed in seeds)
        sizes = draw_sizes(self.draws(task), config)
        return planned_images(memory, orders, config.batch_size, config.steps_per_batch, sizes, self.fills_by_step)

    def presented(self, task: Task) -> np.ndarray:
        """The samples that the task puts into a memory that steps fill, (n,), as often as it does; others may stay out.

        The number of exemplars that a run plans follows from them.
        """
        return np.tile(task.train_indices, self.planned_epochs(task))

    def draws(self, task: Task) -> tuple[Draw, ...]:
        """What each step draws from a memory that steps fill: a batch of ``batch.replay`` for each."""
        return (Draw(),)

    def quotas(self, task: Task, manager: TaskSequence) -> Sequence[int] | None:
        """The number of exemplars of each class seen after ``task``; None: equally many, as the memory's keys say.

        ``manager``: the tasks, and the classes of the whole training set.
        """
        return None

    def stored_bytes(self, num_seen: int) -> int:
        """The bytes that are stored with each exemplar (``self.memory.stored``) once ``num_seen`` classes are known.

        The key ``memory_bytes`` pays for them as for the images.
        """
        return 0
