"""A learner as its method sees it: a loss, and the hooks around it. The loop calls them (:mod:`.loop`)."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc import seeding
from pycil_wsc.data.exemplars import normalise
from pycil_wsc.data.loader import Source
from pycil_wsc.data.memory import ExemplarMemory
from pycil_wsc.data.tasks import Task, TaskSequence
from pycil_wsc.engine.batch import Batch
from pycil_wsc.engine.phase import Monitor, Phase, Resume, refuse_images_and_targets
from pycil_wsc.engine.processes import SINGLE_PROCESS, Processes
from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.keys import NoOptions
from pycil_wsc.learners import loop
from pycil_wsc.learners.options import Costs, LearnerConfig
from pycil_wsc.learners.spending import Spending
from pycil_wsc.learners.toolbox import Toolbox
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.state import State

Arguments = tuple[LearnerConfig, TaskSequence, Source, torch.device, Processes]  # of a learner
HOOK = r"(before|after|begin|end|on|pre|post)_\w+"  # names that look like hooks
NEAR = 0.9  # so similar is a misspelt name to that of a hook, such as `phase` or `endtask`; others are the method's own


class BaseLearner(Toolbox):
    """A continual learner. Its networks are submodules, so ``state_dict`` holds everything that it has learned.

    A method must give ``loss``, unless it has no phases, and may override the other hooks. ``learn`` is never
    overridden. What the hooks may use is in :class:`~pycil_wsc.learners.toolbox.Toolbox`.
    """

    Options: type = NoOptions  # frozen dataclass of the method's own keys (`pycil_wsc.keys.key`)
    uses_memory = True
    needs_exemplars = False  # without exemplars the method is another one
    chooses_first = False  # the exemplars of a task are chosen before it is trained
    starts_anew = False  # each task begins with new initial weights
    needs_new_classes = False  # cannot learn a task that brings only new images of known classes
    averages = False  # averages the weights itself, which consolidation would, too
    one_phase = True  # each task trains one network in one phase, as consolidation requires
    consolidates = False
    measures_quotas = False  # how many exemplars there are depends on the network, so the plan of a run is renewed
    plain_first_task = False  # the first task is plain cross-entropy, so learners may share its trained weights
    epoch_keys: tuple[str, ...] = ("epochs",)  # the keys whose sum is the number of epochs of a later task

    def __init_subclass__(cls) -> None:
        """Refuse a class that is written for hooks that there are not."""
        super().__init_subclass__()
        known = [name for name in dir(BaseLearner) if re.fullmatch(HOOK, name)]
        hooks = [name for name, value in vars(BaseLearner).items() if callable(value) and not name.startswith("_")]
        for name, value in vars(cls).items():
            if name == "learn":
                raise UserError(
                    f"{cls.__qualname__}.learn: the loop is never overridden; use a hook: phases, {', '.join(known)}"
                )
            near = get_close_matches(name, hooks, n=1, cutoff=NEAR)
            if callable(value) and (near or re.fullmatch(HOOK, name)) and not hasattr(BaseLearner, name):
                raise UserError(
                    f"{cls.__qualname__}.{name}: there is no such hook{did_you_mean(name, [*known, *near])}"
                    " (a method of your own begins with an underscore)"
                )
            if name == "loss":
                refuse_images_and_targets(value, f"{cls.__qualname__}.loss", bound=True)

    def __init__(
        self,
        config: LearnerConfig,
        manager: TaskSequence,
        train_source: Source,
        device: torch.device,
        processes: Processes = SINGLE_PROCESS,
    ):
        super().__init__(config, manager, train_source, device, processes)
        self.spending = Spending()
        with self.seeded("weights"):
            self.network = self.build()
        self.place()

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
        """The batch to train on, by default ``batch`` itself: for images that are mixed, as by CutMix.

        Random numbers that are drawn here, on the device, are the same with ``compile`` and after a resume.
        """
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(scalar loss, logits (B, classes) of ``batch.images``), in a phase that has no loss of its own.

        The loss is a mean over the batch, or over parts of it by :meth:`mean_over`, so that processes can share it.
        """
        raise NotImplementedError(f"{type(self).__name__} has a phase, but no loss")

    def after_backward(self, batch: Batch, backward: "loop.Backward") -> None:
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
        """Normalised mean of each class's normalised exemplar features: (num_seen, d).

        None if a class has no exemplars.
        """
        memory = self.memory.classes
        if any(len(memory.get(c, ())) == 0 for c in range(num_seen)):
            return None
        indices = self.memory.indices
        features, targets = normalise(self.features(indices)), self.manager.train_targets[indices]
        return normalise(np.stack([features[targets == c].mean(0) for c in range(num_seen)]))

    def also_tested(self) -> dict[str, nn.Module]:
        """Further networks to test: name -> (images -> logits)."""
        return {}

    def costs(self) -> Costs:
        """Further costs to record in the result, by name: numbers, or lists of one number per task."""
        return {}

    # ---- what is known from the configuration alone ------------------------------------------------------------------

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

    # ---- the task, and its state -------------------------------------------------------------------------------------

    def learn(self, task: Task, monitor: Monitor, resume: Resume | None = None, trained: State | None = None) -> None:
        """Learn one task; see :func:`pycil_wsc.learners.loop.learn`."""
        loop.learn(self, task, monitor, resume, trained)

    def grow_for(self, task: Task) -> None:
        """:meth:`grow` with the task's random numbers, on the device."""
        with self.seeded("weights", task.index):
            self.grow(task)
        self.freeze()
        self.place()

    def choose_exemplars(self, task: Task) -> None:
        """Choose the exemplars of ``task``, once.

        The loop does this after :meth:`end_task`, or with ``chooses_first`` before :meth:`begin_task`.
        """
        if self.memory.tasks > task.index:
            return
        rng = np.random.default_rng(seeding.derived_seed(self.config.seed, "exemplars", task.index))
        quotas = self.measured_quotas(task)
        self.memory.update(task, self.manager.train_targets, self.features, rng, self.processes.map, quotas)
        self.stored.keep(self.memory.indices)

    def trained_state(self) -> State:
        """The result of training the first task, in a form that every learner with the same backbone can load."""
        return {
            "tensors": self._first_task_tensors(),
            "images_trained": self.images_trained,
            "train_flops": self.train_flops,
        }

    def load_trained_state(self, state: State) -> None:
        for mine, trained in zip(self._first_task_tensors(), state["tensors"], strict=True):
            mine.copy_(trained)
        self.images_trained, self.train_flops = state["images_trained"], state["train_flops"]

    def _first_task_tensors(self):
        return [tensor for part in self.network.first_parts() for tensor in part.state_dict().values()]

    def get_extra_state(self) -> State:
        return {
            "memory": self.memory.state_dict(),
            "stored": self.stored.state_dict(),
            "spending": self.spending.state_dict(),
            "images_trained": self.images_trained,
            "train_flops": self.train_flops,
            "step_cost": self.step_cost,
        }

    def set_extra_state(self, state: State) -> None:
        self.memory.load_state_dict(state["memory"])
        self.stored.load_state_dict(state.get("stored", {}))  # missing in states of earlier versions
        if "spending" in state:  # missing in states of earlier versions
            self.spending.load_state_dict(state["spending"])
        self.images_trained, self.train_flops = state["images_trained"], state["train_flops"]
        self.step_cost = state.get("step_cost")  # missing in states of earlier versions
