"""A phase of training within a task, and the position at which a stopped run resumes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from pycil_wsc.data.batches.loader import BatchSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError


@dataclass
class Phase:
    """A phase of training within a task: ``epochs`` passes over ``indices`` of the training set with one optimiser.

    Args:
        epochs: the number of passes.
        optimizer: any optimiser of any parameters. The loop sets the learning rate of its groups, times a group's
            ``lr_scale`` if it has one.
        lr: maps the position in the schedule, in epochs, to the learning rate; a float within an epoch.
        indices: the samples: int64 (n,).
        loss: batch -> (scalar loss, logits (B, classes)).
        network: the only part in training mode.
        name: for the progress bar.
        mixed: batches follow ``replay_ratio``.
        views: how many augmentations of each image a batch has; all but the first are in ``batch.views``.
        source: None: the training images; otherwise a source of the same interface, such as
            :class:`~pycil_wsc.data.batches.features.FeatureSource`, whose rows ``indices`` are, none of them
            ``from_memory``.
        targets: int64 (rows,), the targets of all rows of ``source``.
        draw: generator on the device -> tensors that the loss needs, such as random numbers: ``batch.drawn``. They are
            the same in all processes.
        batch_size: None: the configured one.
        augmentation: None: the configured one.
        images: the number of training images that an epoch counts as; None: that of ``indices``.
        steps: the number of optimiser steps, which may end within the last epoch; None: all.
        seconds: end the phase after this many seconds of training; ``epochs`` is then only the length of the schedule.
        fitted: whether the budget has already set the length (set by the training loop).
        reached: the position in the schedule after the latest epoch, in epochs (set by the training loop).
    """

    epochs: int
    optimizer: torch.optim.Optimizer
    lr: Callable
    indices: np.ndarray
    loss: Callable
    network: nn.Module
    name: str = "train"
    mixed: bool = True
    views: int = 1
    source: BatchSource | None = None
    targets: np.ndarray | None = None
    draw: Callable[[torch.Generator], tuple[torch.Tensor, ...]] | None = None
    batch_size: int | None = None
    augmentation: str | None = None
    images: int | None = None
    steps: int | None = None
    seconds: float | None = None
    fitted: bool = False
    reached: float = 0.0

    @property
    def counted_images(self) -> int:
        """The number of training images of an epoch."""
        return len(self.indices) if self.images is None else self.images


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
    needed = [each for each in arguments if each.kind in POSITIONAL and each.default is each.empty]
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

    def phase_started(self, task: Task, phase: Phase, first: int) -> None:
        """A phase begins, or goes on, with epoch ``first``."""

    def step(self, images: int) -> None:
        pass

    def epoch_ended(self, task: Task, number: int, phase: Phase, epoch: int, loss: float, accuracy: float) -> None:
        """Epoch ``epoch`` of the task's phase ``number`` has ended, with this mean loss and accuracy in percent."""

    def task_trained(self, task: Task) -> None:
        pass
