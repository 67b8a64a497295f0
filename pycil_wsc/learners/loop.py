"""The training loop of all learners: tasks, phases, epochs and steps, and when which hook is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pycil_wsc.data.tasks import Task
from pycil_wsc.engine.batch import Batch
from pycil_wsc.engine.optimization import clip
from pycil_wsc.engine.passes import CompiledPasses, Passes
from pycil_wsc.engine.phase import Monitor, Phase, Resume, refuse_images_and_targets
from pycil_wsc.engine.shared_passes import SharedPasses
from pycil_wsc.engine.step_cost import StepCost
from pycil_wsc.errors import UnusableRun
from pycil_wsc.learners.pace import Pace
from pycil_wsc.state import State

if TYPE_CHECKING:
    from pycil_wsc.learners.base import BaseLearner


def learn(
    learner: BaseLearner,
    task: Task,
    monitor: Monitor,
    resume: Resume | None = None,
    trained: State | None = None,
) -> None:
    """Let ``learner`` learn one task.

    Args:
        learner: has learned the tasks before.
        task: the next task.
        monitor: notified of the task's start, of every step and epoch, and of its end.
        resume: the position and state from which a stopped run resumes.
        trained: the result of training (:meth:`BaseLearner.trained_state`), to load instead of training.
    """
    learner.grow_for(task)
    if resume:
        learner.load_state_dict(resume.learner, strict=False)  # `begin_task` or a phase may add to it
    if learner.chooses_first:
        learner.choose_exemplars(task)
    learner.begin_task(task)
    if not resume:
        monitor.task_started(task)
    if trained:
        learner.load_trained_state(trained)
    else:
        train(learner, task, monitor, resume)
    learner.end_task(task)
    monitor.task_trained(task)
    learner.choose_exemplars(task)
    learner.after_memory(task)


def train(learner: BaseLearner, task: Task, monitor: Monitor, resume: Resume | None) -> None:
    """Train the phases of a task, from the position ``resume`` on."""
    for number, phase in enumerate(learner.phases(task)):
        if resume and number < resume.phase:
            learner.load_state_dict(resume.learner, strict=False)  # what the next phase is prepared from
            continue
        learner.spending.fit(learner, task, number, phase)
        first = 0
        if resume and number == resume.phase:
            learner.load_state_dict(resume.learner)
            phase.optimizer.load_state_dict(resume.optimizer)
            first = resume.epoch
        fit(learner, task, number, phase, first, monitor)


def fit(learner: BaseLearner, task: Task, number: int, phase: Phase, first: int, monitor: Monitor) -> None:
    """Train the epochs of a phase, from epoch ``first`` on. Waits for the device at the end of an epoch only."""
    config, processes, device = learner.config, learner.processes, learner.device
    cost, pace = StepCost(), Pace(learner, phase, first)
    backward = Backward(learner, phase)
    if first:  # a step may cost more or less than that of the first epoch, which counts
        cost.per_image = learner.step_cost
    monitor.phase_started(task, phase, first)
    learner.zero_grad(set_to_none=True)
    for epoch in pace.epochs():
        learner.eval()
        phase.network.train()
        backward.begin_epoch()
        total_loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device, dtype=torch.int64)
        with learner.seeded("dropout", task.index, number, epoch, processes.rank, device=device):
            for part in pace.steps(epoch, epoch_of(learner, task, number, phase, epoch)):
                batch = learner.before_step(part)
                with cost.measured(len(batch)) if cost.unknown else contextlib.nullcontext():
                    loss, right = backward(batch)
                    total_loss += loss
                    correct += right
                    learner.after_backward(batch, backward)
                clip(phase.optimizer, config.clip_norm)
                phase.optimizer.step()
                learner.after_step()
                backward.clear()
                monitor.step(len(batch))
        images = pace.images()
        learner.images_trained += round(phase.counted_images * images / len(phase.indices))
        learner.step_cost = cost.per_image
        learner.train_flops += (cost.per_image or 0) * images
        mean_loss = processes.sum_(total_loss).item() / pace.done
        accuracy = 100 * processes.sum_(correct).item() / images
        pace.end_epoch(epoch)
        learner.after_epoch(task, phase, epoch, mean_loss)
        monitor.epoch_ended(task, number, phase, epoch, mean_loss, accuracy)


def epoch_of(learner: BaseLearner, task: Task, number: int, phase: Phase, epoch: int) -> Iterator[Batch]:
    """The batches of an epoch of the task's phase ``number``."""
    address = task.index, number, epoch
    return learner.training_batches(
        phase.indices,
        *address,
        mixed=phase.mixed,
        views=phase.views,
        source=phase.source,
        targets=phase.targets,
        batch_size=phase.batch_size,
        augmentation=phase.augmentation,
        draw=phase.draw,
    )


class Backward:
    """Computes gradients ``p.grad``: ``backward(batch)`` -> (the phase's loss, number of correct predictions).

    ``backward(batch, loss)`` computes those of another loss.
    """

    def __init__(self, learner: BaseLearner, phase: Phase) -> None:
        self.learner, self.phase = learner, phase
        self.passes: dict[Callable, Passes] = {}  # by loss
        if learner.config.compile:
            torch.compiler.reset()  # what was compiled for the networks of earlier phases is of no more use
        self.last = self.of(phase.loss)

    def __call__(self, batch: Batch, loss: Callable | None = None) -> tuple[Tensor, Tensor]:
        self.clear()
        self.last = self.of(loss or self.phase.loss)
        return self.last(batch)

    def of(self, loss: Callable) -> Passes:
        """The passes of a loss, made at its first use."""
        if loss not in self.passes:
            refuse_images_and_targets(loss, f"{self.phase.name}: loss")
            self.passes[loss] = passes(self.learner, self.phase, loss)
        return self.passes[loss]

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch."""
        for passes_of_loss in self.passes.values():
            passes_of_loss.begin_epoch()

    def clear(self) -> None:
        """Clear the gradients."""
        self.last.clear()


def passes(learner: BaseLearner, phase: Phase, loss: Callable) -> Passes:
    """The forward and backward pass of a step of ``phase`` with ``loss``."""

    def compute(batch):
        with learner.autocast(), single_image_refused(len(batch)):
            return loss(batch)

    if learner.processes.count > 1:
        return SharedPasses(compute, phase.optimizer, learner.processes, learner.config.sync_batch_norm)
    if mode := learner.config.compile:
        fused = torch.compile(loss, dynamic=False, mode=None if mode is True else mode)

        def compiled(batch):
            with learner.autocast():
                return fused(batch)

        return CompiledPasses(compute, phase.optimizer, compiled)
    return Passes(compute, phase.optimizer)


@contextlib.contextmanager
def single_image_refused(number: int) -> Iterator[None]:
    """Say in one line what to do if batch norm cannot train on a batch of ``number`` images, which is one."""
    try:
        yield
    except ValueError as error:
        if number > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise UnusableRun(
            "batch_size: batch norm cannot train on a single image whose features are one pixel wide; raise "
            "batch_size or image_size, or give more images"
        ) from None
