"""A phase of training within a task, how the loop runs it, and the position at which a stopped run resumes."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pycil_wsc.data.batches.epoch_order import batch_slices, repeated
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.optimizers.parameter_groups import set_rate
from pycil_wsc.training.optimizers.schedules import Schedule

Loss = Callable[[Batch], tuple[Tensor, Tensor]]  # batch -> (scalar loss, logits (B, classes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase(Sampling):
    """A phase of training within a task: ``epochs`` passes over ``indices`` of the training set with one optimiser.

    A declaration: what the loop makes of it is a :class:`PhaseRun`.

    Args:
        epochs: the number of passes.
        optimizer: any optimiser of any parameters. The loop sets the learning rate of its groups, times a group's
            ``lr_scale`` if it has one.
        lr: maps the position in the schedule, in epochs, to the learning rate; a float within an epoch.
        loss: batch -> (scalar loss, logits (B, classes)).
        network: the only part in training mode.
        name: for the progress bar.
        images: the number of training images that an epoch counts as; None: that of ``indices``.

    The other arguments are those of :class:`~.batches.Sampling`.
    """

    epochs: int
    optimizer: torch.optim.Optimizer
    lr: Schedule
    loss: Loss
    network: nn.Module
    name: str = "train"
    images: int | None = None

    @property
    def counted_images(self) -> int:
        """The number of training images of an epoch, each counted once."""
        return len(self.indices) if self.images is None else self.images


class PhaseRun:
    """How the loop runs a phase, the ``number``-th of its task: its length, its learning rates, and where it is.

    Attributes:
        batches: the steps of a whole epoch.
        epochs: the epochs, of which the last may end early.
        steps: the optimiser steps of all epochs.
        lr: the learning rate at a position in the schedule, in epochs.
        first: the epoch with which the phase begins; above 0 when a stopped run resumes within it.
        done: the steps of the current epoch so far.
        replayed: the exemplars in these steps, in this process.
        drawn: those of them that are drawn beside the batches, in all processes.
    """

    def __init__(self, phase: Phase, number: int, batch_size: int, by_step: bool) -> None:
        self.phase = phase
        self.number = number
        size = phase.batch_size or batch_size
        _, self.slices = repeated(phase.indices, batch_slices(len(phase.indices), size, join=True), phase.times)
        self.by_step = by_step  # whether the learning rate changes with each step, not with each epoch
        self.batches = len(self.slices)
        self.epochs = phase.epochs
        self.steps = phase.epochs * self.batches
        self.lr = phase.lr
        self.first = 0
        self.done = 0
        self.replayed = 0
        self.drawn = 0

    def end_after(self, steps: int) -> None:
        """End after this many steps, within an epoch too."""
        self.steps = steps
        self.epochs = -(-steps // self.batches)

    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rate of an epoch."""
        self.done = 0
        self.replayed = 0
        self.drawn = 0
        set_rate(self.phase.optimizer, self.lr(epoch))

    def within(self, epoch: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch, up to the end of the phase. Sets the learning rate of each step."""
        last = min(self.batches, self.steps - epoch * self.batches)
        for step, batch in enumerate(batches):
            if step == last:
                return
            if self.by_step:
                set_rate(self.phase.optimizer, self.lr(epoch + step / self.batches))
            self.done = step + 1
            self.replayed += batch.exemplars
            self.drawn += sum(replayed.whole or 0 for replayed in batch.replay)
            yield batch

    @property
    def images(self) -> int:
        """The number of images in the steps of the epoch so far, in all processes."""
        return self.slices[self.done - 1].stop


@dataclass(frozen=True)
class Resume:
    """The state from which a stopped run resumes within a task, after ``epoch`` epochs of phase ``phase``."""

    phase: int
    epoch: int
    learner: dict
    optimizer: dict


def refuse_images_and_targets(loss: Callable, name: str, bound: bool = False) -> None:
    """Raise a :class:`UserError` if ``loss`` takes (images, targets), as before batches were objects.

    ``bound``: it is a function of a class, whose first argument is the object.
    """
    arguments = list(inspect.signature(loss).parameters.values())[1 if bound else 0 :]
    needed = [argument for argument in arguments if argument.kind in POSITIONAL and argument.default is argument.empty]
    if len(needed) == 2:
        names = " and ".join(f"batch.{new}" for new in ("images", "targets"))
        first = "self, " if bound else ""
        raise UserError(
            f"{name}({first}{needed[0].name}, {needed[1].name}): a loss takes one batch now; write "
            f"{name}({first}batch), and use {names} in it"
        )


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Monitor:
    """What is notified while a learner learns a task. It ignores what it does not override."""

    def task_started(self, task: Task) -> None:
        pass

    def phase_started(self, task: Task, run: PhaseRun) -> None:
        """A phase begins, or goes on, with epoch ``run.first``."""

    def step(self, images: int) -> None:
        pass

    def epoch_ended(self, task: Task, run: PhaseRun, epoch: int, loss: float, accuracy: float) -> None:
        """Epoch ``epoch`` of a phase has ended, with this mean loss and accuracy in percent."""

    def task_trained(self, task: Task) -> None:
        pass
