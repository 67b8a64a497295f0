"""A learner: what a method overrides, what its hooks may use, how it learns a task, and its state."""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc import registry, seeding
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.memory.exemplar_selection import normalise
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.keys import NoOptions
from pycil_wsc.networks.layers import freeze, mark_frozen
from pycil_wsc.networks.nets import Backbone, IncrementalNet, make_backbone
from pycil_wsc.state import State
from pycil_wsc.training import learner_state, loop
from pycil_wsc.training.batches import Batch, Batches
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.optimizers.parameter_groups import parameter_groups
from pycil_wsc.training.optimizers.schedules import task_schedule
from pycil_wsc.training.outputs import Outputs
from pycil_wsc.training.over import Over
from pycil_wsc.training.phase import Monitor, Phase, PhaseRun, Resume, refuse_images_and_targets
from pycil_wsc.training.plan import Plan as MethodPlan
from pycil_wsc.training.precision import Precision, is_undefined_in_bf16
from pycil_wsc.training.processes import SINGLE_PROCESS, Processes
from pycil_wsc.training.step.backward import Backward
from pycil_wsc.training.step.cost import Spent

Given = tuple[TaskSequence, Source, torch.device, Processes]  # what a run gives a learner beside its configuration
Arguments = tuple[LearnerConfig, Unpack[Given]]  # of a learner's constructor
HOOK = r"(before|after|begin|end|on|pre|post)_\w+"  # names that look like hooks
OF_PYCIL = {
    "incremental_train": "the hook loss, or phases",
    "after_task": "the hook after_memory, or end_task",
    "eval_task": "the hooks extract and classify",
    "build_rehearsal_memory": "register_exemplars",
}
PLANNED = {  # what stands in a method's Plan, and how
    name: f"as def {name}(self, ...), with self.config" if callable(value) else f"as {name} = ..."
    for name, value in vars(MethodPlan).items()
    if not name.startswith("_")
}
NEAR = 0.9  # the least similarity of a misspelt name, such as `phase`, to a hook's; other names are the method's own


class BaseLearner(nn.Module):
    """A continual learner. Its networks are submodules, so ``state_dict`` holds everything that it has learned.

    A method must give ``loss``, unless it has no phases, and may override the other hooks, which the loop calls
    (:mod:`.loop`). ``learn`` is never overridden.

    Args:
        config: the configuration, whose ``options`` has the method's own keys.
        manager: the tasks, with the classes of all samples.
        train_source: gives the training images in batches.
        device: where the networks are.
        processes: those that share each batch; each has its own copy of the learner.

    Hooks may use these objects:

    * ``batches``: training batches, shuffled and augmented, or plain (:class:`.batches.Batches`)
    * ``outputs``: features and logits of many images (:class:`.outputs.Outputs`)
    * ``over``: means, sums and norms over a batch that processes share, and its images' weights (:class:`.over.Over`)
    * ``precision``: the contexts in which the network computes (:class:`.precision.Precision`)
    * ``memory``, and ``memory.stored``, the values that are stored with each exemplar

    Attributes:
        Options: a frozen dataclass of the method's own keys (:func:`pycil_wsc.keys.key`).
        Plan: what is known of the method before it has a network: facts, and arithmetic (:class:`.plan.Plan`).
    """

    network: IncrementalNet  # what `build` returns

    Options: type = NoOptions
    Plan: type[MethodPlan] = MethodPlan

    def __init_subclass__(cls) -> None:
        """Raise :class:`UserError` for a class that defines hooks that do not exist, such as PyCIL's."""
        super().__init_subclass__()
        _complete_plan(cls)
        known = [name for name in dir(BaseLearner) if re.fullmatch(HOOK, name)]
        members = vars(BaseLearner)
        hooks = [name for name, value in members.items() if callable(value) and not name.startswith("_")]
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
            if name in PLANNED:
                raise UserError(
                    f"{cls.__qualname__}.{name}: belongs in the class {cls.__qualname__}.Plan, {PLANNED[name]}"
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
        super().__init__()
        self.config = config
        self.manager = manager
        self.device = device
        self.processes = processes
        self.plan = self.Plan(config)
        self.batches = Batches(self, train_source)
        self.precision = Precision(config.precision, device, self._undefined_in_bf16)
        self.outputs = Outputs(self)
        self.over = Over(processes, config.label_smoothing)
        self.memory = configured_memory(config, self.plan, device)
        self.spent = Spent()
        with seeding.seeded(self.config.seed, "weights"):
            self.network = self.build()
        _place(self)

    # ---- hooks, in the order in which they are called ----------------------------------------------------------------

    def build(self) -> IncrementalNet:
        """The network before the first task."""
        return IncrementalNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        """Extend the network to the task's classes, and note what hooks need to know of the task.

        When a run resumes, called for each earlier task first, and before the state is loaded: it may depend on the
        configuration and the tasks alone.
        """
        self.network.grow(num_logits(self.config, task, self.manager))

    def begin_task(self, task: Task) -> None:
        """Called before training, after :meth:`grow`.

        Not called when a run resumes within the task: what it computes must be part of the state, as buffers that
        ``__init__`` or :meth:`grow` registers are, and what ``get_extra_state`` returns.
        """

    def phases(self, task: Task) -> Iterator[Phase]:
        """The task's phases, in order, each declared when the one before it has ended.

        A method without training yields none, and learns in :meth:`end_task`. This declares, and changes no weights:
        when a run resumes, it runs from its beginning with the state of the stop, and phases that have ended are
        passed over. What happens between two phases belongs in :meth:`end_phase`.
        """
        yield self.main_phase(task)

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        """Called before a phase, whose length and learning rates are known now and may be changed: ``run``.

        Also called when a run resumes within the phase, with the state of the stop; ``run.first`` is above 0 then.
        """

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        """Called after the last epoch of a phase: for what the next one starts from."""

    def before_step(self, batch: Batch) -> Batch:
        """The batch to train on, by default ``batch`` itself: for images that are mixed, as by CutMix, and for passes
        of other networks over the exemplars alone (``batch.exemplar_rows``), whose outputs the loss finds in ``drawn``.

        Random numbers that are drawn here, on the device, are the same with ``compile`` and after a resume. Operations
        count as so many per exemplar of the batch.
        """
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(scalar loss, logits (B, classes) of ``batch.images``), in a phase that has no loss of its own.

        The loss is a mean over the batch, or over parts of it by ``self.over``, so that processes can share it.
        """
        raise NotImplementedError(f"{type(self).__name__} has a phase, but no loss")

    def to_store(self, batch: Batch, logits: Tensor) -> dict[str, Tensor]:
        """What is stored with the images of ``batch`` that enter a memory filled by steps: {name: rows (B, ...)}.

        Called after the backward pass and before the step, as ``logits`` (B, classes) are there. A replayed batch has
        the rows of its exemplars in ``stored``.
        """
        return {}

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        """Called when the gradients are there, before they are clipped and the optimiser steps.

        ``backward(batch, loss)`` replaces them by those of another batch, at other weights, or of another loss (by
        default, the phase's): for projections (A-GEM) and sharpness (SAM). Copy the first ones if you need them.
        """

    def after_step(self) -> None:
        """Called after each ``optimizer.step()``, before the gradients are cleared."""

    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None:
        """Called after each epoch of a phase with its mean training loss."""

    def end_task(self, task: Task) -> None:
        """Called after training, before exemplars are chosen and the network is tested."""

    def after_memory(self, task: Task) -> None:
        """Called when the exemplars of the task are chosen, before the test: to store their logits, for example."""

    # ---- prediction --------------------------------------------------------------------------------------------------

    def extract(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d) features, for herding, nearest mean and ``classify``."""
        return self.network.extract(images)

    def classify(self, features: Tensor) -> Tensor:
        """(B, d) features -> (B, classes) logits, of the classes seen."""
        return self.outputs.known(self.network.classify(features))

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
        features, targets = normalise(self.outputs.features(indices)), self.manager.train_targets[indices]
        return normalise(np.stack([features[targets == c].mean(0) for c in range(num_seen)]))

    def also_tested(self) -> dict[str, nn.Module]:
        """Further networks to test, by name: (B, 3, H, W) images -> (B, classes) logits."""
        return {}

    # ---- what hooks may use ------------------------------------------------------------------------------------------

    def main_phase(
        self,
        task: Task,
        parameters: Iterable[nn.Parameter] | None = None,
        epochs: int | None = None,
        weight_decay: float | None = None,
    ) -> Phase:
        """The usual phase: the configured optimiser and schedule over the task's data and the memory.

        Args:
            task: the task; the keys of the first one begin with ``init``.
            parameters: those that the phase trains; None: all of :attr:`network`.
            epochs: None: the configured number.
            weight_decay: None: the configured one.
        """
        c = self.config
        first = task.index == 0
        usual_epochs, usual_decay = (c.init_epoch, c.init_weight_decay) if first else (c.epochs, c.weight_decay)
        num_epochs: int = usual_epochs if epochs is None else epochs
        decay: float = usual_decay if weight_decay is None else weight_decay
        optimizer = self._optimizer(parameters or self.network.parameters(), decay)
        stream = isinstance(self.memory, StreamMemory)
        indices = self.plan.new_samples(task, self.manager.train_targets) if stream else self.batches.indices(task)
        times = c.steps_per_batch if stream else 1
        interval = 1 if c.schedule_unit == "epoch" else 1 / (times * self.batches.number(len(indices)))
        lr = task_schedule(c, first, num_epochs, interval)
        return Phase(
            epochs=num_epochs,
            optimizer=optimizer,
            lr=lr,
            indices=indices,
            loss=self.loss,
            network=self.network,
            mixed=self.plan.mixes,
            stream=stream,
            times=times,
        )

    def _optimizer(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
        """A new optimiser, as configured, of the trainable ``parameters``; the loop sets its learning rate.

        It has a group for each ``lr_scale``, the factor of the schedule's learning rate: ``backbone_lr_factor *
        layer_decay ** depth`` for a layer at this distance from the head, and 1 for all others.
        """
        depths = {}
        for network in self.children():
            depths |= getattr(network, "depths", dict)()
        groups = parameter_groups(parameters, weight_decay, depths, self.config)
        return registry.optimizers[self.config.optimizer](groups, self.config)

    def new_backbone(self, pretrained: bool | str | None = None) -> Backbone:
        """A new backbone as configured, with its frozen parts marked; ``pretrained`` overrides the configuration."""
        source = self.batches.source
        side = source.info.image_size if source else None  # PyCIL's scripts build before loading
        return configured_backbone(self.config, side, self.config.pretrained if pretrained is None else pretrained)

    def _undefined_in_bf16(self) -> bool:
        """Whether the backbone's gradients are undefined in bf16 on the CPU; logs a warning if so."""
        name, side = self.config.convnet_type, self.batches.source.info.image_size
        needed = is_undefined_in_bf16(name, self.config.convnet_options, side)
        if needed:
            logging.getLogger("pycil_wsc").warning(
                "precision: images of side %d are too small for '%s' in bf16 on the CPU (gradients of a convolution "
                "would be undefined); computing in fp32",
                side,
                name,
            )
        return needed

    # ---- the task, and its state -------------------------------------------------------------------------------------

    def learn(self, task: Task, monitor: Monitor, resume: Resume | None = None, trained: State | None = None) -> None:
        """Learn one task.

        Args:
            task: the next task; the learner has learned those before.
            monitor: notified of the task's start, of every step and epoch, and of its end.
            resume: the position and state from which a stopped run resumes.
            trained: the result of training (:func:`.learner_state.first_task_state`), to load instead of training.

        Raises:
            UserError: an image cannot be read, or the task cannot be trained as configured (``UnusableRun``).
            NonFiniteGradients: in a learner that is consolidated, a gradient in the warm-up, or another importance, was
                infinite or NaN.
        """
        grow_for(self, task)
        if isinstance(self.memory, StreamMemory):
            self.memory.limit(num_logits(self.config, task, self.manager), len(self.manager.tasks))
        if resume:
            self.load_state_dict(resume.learner)
        self.spent.begin(task.index)
        if not resume:
            if self.plan.chooses_first:
                self._choose_exemplars(task)
            self.begin_task(task)
            monitor.task_started(task)
        if trained:
            learner_state.load_first_task(self, trained)
        else:
            loop.train(self, task, monitor, resume)
        self.end_task(task)
        monitor.task_trained(task)
        self._choose_exemplars(task)
        self.after_memory(task)

    def _choose_exemplars(self, task: Task) -> None:
        """Choose the exemplars of ``task``, once.

        The loop does this after :meth:`end_task`, or with ``Plan.chooses_first`` before :meth:`begin_task`.
        """
        if self.memory.tasks > task.index:
            return
        rng = np.random.default_rng(seeding.derived_seed(self.config.seed, "exemplars", task.index))
        quotas = self.plan.quotas(task, self.manager)
        self.memory.update(task, self.manager.train_targets, self.outputs.features, rng, self.processes.map, quotas)

    def get_extra_state(self) -> State:
        return {
            "memory": self.memory.state_dict(),
            "stored": self.memory.stored.state_dict(),
            "spending": self.spent.state_dict(),
            "images_trained": self.spent.images,
            "train_flops": self.spent.operations,
            "step_cost": self.spent.per_image,
            "exemplar_cost": self.spent.per_exemplar,
        }

    def set_extra_state(self, state: State) -> None:
        self.memory.load_state_dict(state["memory"])
        self.memory.stored.load_state_dict(state.get("stored", {}))  # 0.1.0 has none, as below
        if "spending" in state:
            self.spent.load_state_dict(state["spending"])
        self.spent.images = state["images_trained"]
        self.spent.operations = state["train_flops"]
        self.spent.per_image = state.get("step_cost")
        self.spent.per_exemplar = state.get("exemplar_cost", 0)  # which 0.1.0 has counted in that per image


def grow_for(learner: BaseLearner, task: Task) -> None:
    """:meth:`BaseLearner.grow` with the task's random numbers, on the device."""
    learner.outputs.num_known = task.num_seen
    with seeding.seeded(learner.config.seed, "weights", task.index):
        learner.grow(task)
    freeze(learner)
    _place(learner)


def _place(learner: BaseLearner) -> None:
    """Move all networks to the device, in the memory format that ``channels_last`` sets."""
    memory_format = torch.channels_last if learner.config.channels_last else torch.preserve_format
    learner.to(learner.device, memory_format=memory_format)  # pyright: ignore[reportCallIssue]


def regrow(learner: BaseLearner, tasks: Sequence[Task]) -> None:
    """Grow a new learner to those of the ``tasks`` that were learned; its state is loaded next."""
    for task in tasks[-1:] if learner.plan.grows_at_once else tasks:
        grow_for(learner, task)


def _complete_plan(cls: type[BaseLearner]) -> None:
    """Derive the ``Plan`` of a new class from those of all its bases. Raises :class:`UserError` if its own is not."""
    plans = [base.Plan for base in cls.__bases__ if issubclass(base, BaseLearner)]
    parents = [plan for plan in plans if not any(other is not plan and issubclass(other, plan) for other in plans)]
    parents = list(dict.fromkeys(parents))
    if "Plan" not in vars(cls):
        if len(parents) > 1:
            cls.Plan = type("Plan", tuple(parents), {})
        return
    names = ", ".join(parent.__qualname__ if parent is not MethodPlan else "BaseLearner.Plan" for parent in parents)
    if not (isinstance(cls.Plan, type) and all(issubclass(cls.Plan, parent) for parent in parents)):
        raise UserError(f"{cls.__qualname__}.Plan: is not derived from its base's; write class Plan({names})")
    for name in vars(cls.Plan):
        near = get_close_matches(name, PLANNED, n=1, cutoff=NEAR)
        if near and name not in PLANNED:
            raise UserError(f"{cls.__qualname__}.Plan.{name}: there is no such name{did_you_mean(name, near)}")


def configured_memory(
    config: LearnerConfig, plan: MethodPlan, device: torch.device = torch.device("cpu")
) -> ExemplarMemory:
    """An empty memory as configured, of a method with this ``plan``."""
    capacity = functools.partial(capacity_of, config, plan)
    strategy = "ring" if plan.ring else config.exemplars
    sizes = config.fixed_memory, config.memory_per_class, config.memory_size, strategy, capacity, device
    return StreamMemory(*sizes, plan.presented) if config.by_step else ExemplarMemory(*sizes)


def num_logits(config: LearnerConfig, task: Task, manager: TaskSequence) -> int:
    """The number of logits in ``task``: of the classes seen, or of all that the run will learn.

    Of a list of tasks, which may become longer, all are those of the tasks so far.
    """
    return len(manager.class_order) if config.whole_head and not manager.open_ended else task.num_seen


def capacity_of(config: LearnerConfig, plan: MethodPlan, num_seen: int) -> int:
    """The number of exemplars in all once ``num_seen`` classes are known, with ``fixed_memory`` false.

    ``memory_bytes`` also pays for what is stored with each, so that fewer fit the more classes there are.
    """
    size = config.memory_size
    if config.memory_bytes is None or not size:
        return size
    # an image takes memory_bytes / memory_size bytes, or a little less
    return config.memory_bytes * size // (config.memory_bytes + size * plan.stored_bytes(num_seen))


def configured_backbone(config: LearnerConfig, image_size: int | None, pretrained: bool | str) -> Backbone:
    """A new backbone for images of side ``image_size``, with its frozen parts marked. Raises :class:`UserError`."""
    checkpointing = config.grad_checkpointing
    backbone = make_backbone(config.convnet_type, config.convnet_options, pretrained, image_size, checkpointing)
    mark_frozen(backbone, config.freeze)
    return backbone
