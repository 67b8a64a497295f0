"""What a method may say of itself: its class attributes and hooks, with their defaults."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor, nn

from pycil_wsc.data.memory.choices import normalise
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.keys import NoOptions
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.training.batch import Batch
from pycil_wsc.training.learner_config import Costs, LearnerConfig
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.step.backward import Backward
from pycil_wsc.training.toolbox import Toolbox


class Hooks(Toolbox):
    """What a learner's method may override. The loop calls the hooks (:mod:`.loop`); what they may use is in
    :class:`~pycil_wsc.training.toolbox.Toolbox`.

    Attributes:
        Options: a frozen dataclass of the method's own keys (:func:`pycil_wsc.keys.key`).
        uses_memory: whether the method keeps exemplars.
        needs_exemplars: whether it would be another method without exemplars; they are then required.
        chooses_first: whether the exemplars of a task are chosen before it is trained.
        starts_anew: whether each task begins with new initial weights.
        mixes: whether its batches follow ``replay_ratio``.
        needs_new_classes: whether it cannot learn a task that brings only new images of known classes.
        averages: whether it averages the weights itself, so that it cannot be consolidated.
        one_phase: whether each task trains one network in one phase, as consolidation requires.
        consolidates: whether Weight Space Consolidation is a part of it.
        measures_quotas: whether the numbers of exemplars depend on the trained network, so that a run plans again.
        plain_first_task: whether the first task is plain cross-entropy, so that learners may share its trained weights.
        epoch_keys: the keys whose sum is the number of epochs of a later task.
        own_schedules: of these, the keys of phases whose learning rate has a schedule of its own.
    """

    Options: type = NoOptions
    uses_memory = True
    needs_exemplars = False
    chooses_first = False
    starts_anew = False
    mixes = True
    needs_new_classes = False
    averages = False
    one_phase = True
    consolidates = False
    measures_quotas = False
    plain_first_task = False
    epoch_keys: tuple[str, ...] = ("epochs",)
    own_schedules: tuple[str, ...] = ()

    # ---- hooks, in the order in which they are called ----------------------------------------------------------------

    def build(self) -> nn.Module:
        """The network before the first task."""
        return IncrementalNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        """Extend the network to the task's classes. When a run resumes, called for each earlier task first."""
        self.network.grow(task.num_seen)

    def begin_task(self, task: Task) -> None:
        """Called before training, after :meth:`grow`.

        When a run resumes within the task, the state has been restored: weights, memory, and what the learner itself
        keeps. The weights are those of the stop, not those from before the task. What this hook computes from weights
        must therefore be part of the state too, which is loaded once more when the phase resumes.
        """

    def phases(self, task: Task) -> Iterator[Phase]:
        """The task's phases, in order; a generator may prepare each just before it starts.

        A method without training yields none, and learns in :meth:`end_task`. When a run resumes, the generator starts
        from its beginning with the state of the stop, which is loaded once more when the phase that resumes has been
        yielded.
        """
        yield self.main_phase(task)

    def new_samples(self, task: Task) -> np.ndarray:
        """The samples of the task that it trains on, by default all: (n,). The same at each call; may have repeats."""
        return task.train_indices

    def before_step(self, batch: Batch) -> Batch:
        """The batch to train on, by default ``batch`` itself: for images that are mixed, as by CutMix, and for passes
        of other networks over the exemplars alone (``batch.exemplar_rows``), whose outputs the loss finds in ``drawn``.

        Random numbers that are drawn here, on the device, are the same with ``compile`` and after a resume. Operations
        count as so many per exemplar of the batch.
        """
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(scalar loss, logits (B, classes) of ``batch.images``), in a phase that has no loss of its own.

        The loss is a mean over the batch, or over parts of it by :meth:`mean_over`, so that processes can share it.
        """
        raise NotImplementedError(f"{type(self).__name__} has a phase, but no loss")

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        """Called when the gradients are there, before they are clipped and the optimiser steps.

        ``backward(batch, loss)`` replaces them by those of another batch, at other weights, or of another loss (by
        default, the phase's): for projections (A-GEM) and sharpness (SAM). Copy the first ones if you need them.
        """

    def after_step(self) -> None:
        """Called after each ``optimizer.step()``, before the gradients are cleared."""

    def after_epoch(self, task: Task, phase: Phase, epoch: int, loss: float) -> None:
        """Called after each epoch of a phase with its mean training loss."""

    def end_task(self, task: Task) -> None:
        """Called after training, before exemplars are chosen and the network is tested."""

    def measured_quotas(self, task: Task) -> Sequence[int] | None:
        """:meth:`quotas` when the network has been trained, if they depend on it: see ``measures_quotas``."""
        return self.quotas(self.config, task, self.manager)

    def after_memory(self, task: Task) -> None:
        """Called when the exemplars of the task are chosen, before the test: to store their logits, for example."""

    def time_constants(self) -> dict[str, float]:
        """Keys that need time: {key: the optimiser steps within a task until its value takes effect}.

        A run says in one line, before it trains, which of them are longer than its tasks.
        """
        return {}

    # ---- prediction --------------------------------------------------------------------------------------------------

    def extract(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d) features, for herding, nearest mean and ``classify``."""
        return self.network.extract(images)

    def classify(self, features: Tensor) -> Tensor:
        """(B, d) features -> (B, classes) logits."""
        return self.network.classify(features)

    def predict(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes) logits."""
        return self.classify(self.extract(images))

    def class_means(self, num_seen: int) -> np.ndarray | None:
        """Normalised mean of each class's normalised exemplar features: float32 numpy (num_seen, d).

        None if a class has no exemplars.
        """
        memory = self.memory.classes
        if any(len(memory.get(c, ())) == 0 for c in range(num_seen)):
            return None
        indices = self.memory.indices
        features, targets = normalise(self.features(indices)), self.manager.train_targets[indices]
        return normalise(np.stack([features[targets == c].mean(0) for c in range(num_seen)]))

    def also_tested(self) -> dict[str, nn.Module]:
        """Further networks to test, by name: (B, 3, H, W) images -> (B, classes) logits."""
        return {}

    def costs(self) -> Costs:
        """Further costs to record in the result, by name: numbers, or lists of one number per task."""
        return {}

    # ---- what is known from the configuration alone ------------------------------------------------------------------

    @classmethod
    def stored_bytes(cls, config: LearnerConfig, num_seen: int) -> int:
        """The bytes that are stored with each exemplar (``self.stored``) once ``num_seen`` classes are known.

        The key ``memory_bytes`` pays for them as for the images.
        """
        return 0

    @classmethod
    def check(cls, config: LearnerConfig) -> str | None:
        """One line that says what is wrong with the learner's own options, or None."""

    @classmethod
    def check_backbone(cls, backbone: nn.Module, config: LearnerConfig) -> None:
        """Raise :class:`UserError` if the method cannot use ``backbone``. Called before anything is trained."""

    @classmethod
    def also_reads(cls, config: LearnerConfig) -> set[str]:
        """Which of ``memory_size`` and ``memory_per_class`` the method reads whatever ``fixed_memory`` is."""
        return set()

    @classmethod
    def planned_epochs(cls, config: LearnerConfig, task: Task) -> int:
        """The number of epochs of a task, for the cost that ``--dry-run`` prints."""
        values = vars(config) | vars(config.options)
        return sum(values[key] for key in cls.epoch_keys) if task.index else config.init_epoch

    @classmethod
    def planned_images(cls, config: LearnerConfig, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
        """The images that the task trains on, over all epochs, with the exemplars in ``memory``. A run checks this.

        ``targets``: (N,), the classes of the whole training set.
        """
        return cls.planned_epochs(config, task) * (len(task.train_indices) + len(memory))

    @classmethod
    def quotas(cls, config: LearnerConfig, task: Task, manager: TaskSequence) -> Sequence[int] | None:
        """The number of exemplars of each class seen after ``task``; None: equally many, as the memory's keys say.

        ``manager``: the tasks, and the classes of the whole training set.
        """
        return None
