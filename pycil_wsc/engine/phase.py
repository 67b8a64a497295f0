"""A phase of training within a task, and the position at which a stopped run resumes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pycil_wsc.errors import UserError


@dataclass
class Phase:
    """A phase of training within a task: ``epochs`` passes over ``indices`` of the training set with one optimiser.

    Args:
        epochs: the number of passes.
        optimizer: any optimiser of any parameters. The loop sets the learning rate of its groups, times a group's
            ``lr_scale`` if it has one.
        lr: maps the epoch to the learning rate.
        indices: the samples: int64 (n,).
        loss: batch -> (loss, logits).
        network: the only part in training mode.
        name: for the progress bar.
        mixed: batches follow ``replay_ratio``.
        views: how many augmentations of each image a batch has; all but the first are in ``batch.views``.
        source: None: the training images; otherwise a source of the same interface, such as
            :class:`pycil_wsc.data.features.FeatureSource`, whose rows ``indices`` are. They are not ``from_memory``.
        targets: the targets of all rows of ``source``.
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
    source: Any = None
    targets: np.ndarray | None = None


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
