"""A learner: how it learns a task, and its state."""

import re
from difflib import get_close_matches

import numpy as np
import torch

from pycil_wsc import seeding
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.state import State
from pycil_wsc.training import loop
from pycil_wsc.training.hooks import Hooks
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.phase import Monitor, Resume, refuse_images_and_targets
from pycil_wsc.training.processes import SINGLE_PROCESS, Processes

Arguments = tuple[LearnerConfig, TaskSequence, Source, torch.device, Processes]  # of a learner's constructor
HOOK = r"(before|after|begin|end|on|pre|post)_\w+"  # names that look like hooks
OF_PYCIL = {
    "incremental_train": "the hook loss, or phases",
    "after_task": "the hook after_memory, or end_task",
    "eval_task": "the hooks extract and classify",
    "build_rehearsal_memory": "register_exemplars",
}
NEAR = 0.9  # the least similarity of a misspelt name, such as `phase`, to a hook's; other names are the method's own


class BaseLearner(Hooks):
    """A continual learner. Its networks are submodules, so ``state_dict`` holds everything that it has learned.

    A method must give ``loss``, unless it has no phases, and may override the other hooks. ``learn`` is never
    overridden. The hooks are in :class:`~pycil_wsc.training.hooks.Hooks`, and what they may use in
    :class:`~pycil_wsc.training.toolbox.Toolbox`.

    Args:
        config: the configuration, whose ``options`` has the method's own keys.
        manager: the tasks, with the classes of all samples.
        train_source: gives the training images in batches.
        device: where the networks are.
        processes: those that share each batch; each has its own copy of the learner.
    """

    def __init_subclass__(cls) -> None:
        """Raise :class:`UserError` for a class that defines hooks that do not exist, such as PyCIL's."""
        super().__init_subclass__()
        known = [name for name in dir(BaseLearner) if re.fullmatch(HOOK, name)]
        own = vars(Hooks) | vars(BaseLearner)
        hooks = [name for name, value in own.items() if callable(value) and not name.startswith("_")]
        for name, value in vars(cls).items():
            if name == "learn":
                raise UserError(
                    f"{cls.__qualname__}.learn: the loop is never overridden; use a hook: phases, {', '.join(known)}"
                )
            if name == "predict":
                raise UserError(f"{cls.__qualname__}.predict: is classify(extract(images)); override these two")
            if name in OF_PYCIL:
                raise UserError(f"{cls.__qualname__}.{name}: is PyCIL's, and never called here; use {OF_PYCIL[name]}")
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
        with self.seeded("weights"):
            self.network = self.build()
        self.place()

    # ---- the task, and its state -------------------------------------------------------------------------------------

    def learn(self, task: Task, monitor: Monitor, resume: Resume | None = None, trained: State | None = None) -> None:
        """Learn one task.

        Args:
            task: the next task; the learner has learned those before.
            monitor: notified of the task's start, of every step and epoch, and of its end.
            resume: the position and state from which a stopped run resumes.
            trained: the result of training (:meth:`trained_state`), to load instead of training.

        Raises:
            UserError: an image cannot be read, or the task cannot be trained as configured (``UnusableRun``).
            NonFiniteGradients: in a learner that is consolidated, a gradient in the warm-up, or another importance, was
                infinite or NaN.
        """
        self.grow_for(task)
        if resume:
            self.load_state_dict(resume.learner, strict=False)  # `begin_task` or a phase may add to it
        if self.chooses_first:
            self.choose_exemplars(task)
        self.begin_task(task)
        if not resume:
            monitor.task_started(task)
        if trained:
            self.load_trained_state(trained)
        else:
            loop.train(self, task, monitor, resume)
        self.end_task(task)
        monitor.task_trained(task)
        self.choose_exemplars(task)
        self.after_memory(task)

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
            "exemplar_cost": self.exemplar_cost,
        }

    def set_extra_state(self, state: State) -> None:
        self.memory.load_state_dict(state["memory"])
        self.stored.load_state_dict(state.get("stored", {}))  # missing in states of earlier versions
        if "spending" in state:  # missing in states of earlier versions
            self.spending.load_state_dict(state["spending"])
        self.images_trained, self.train_flops = state["images_trained"], state["train_flops"]
        self.step_cost = state.get("step_cost")  # missing in states of earlier versions
        self.exemplar_cost = state.get("exemplar_cost", 0)  # missing likewise: part of the cost per image
