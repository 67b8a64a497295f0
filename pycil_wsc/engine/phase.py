"""A stretch of training within a task, and where a stopped run stood in one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Phase:
    """A stretch of training within a task: ``epochs`` passes over ``indices`` of the training set with one optimiser.

    ``lr`` maps the epoch to the learning rate; ``loss`` is (images, targets) -> (loss, logits); ``network`` is the part
    in training mode, all else being in evaluation mode; ``name`` is for the progress bar.
    """

    epochs: int
    optimizer: torch.optim.Optimizer
    lr: Callable
    indices: np.ndarray
    loss: Callable
    network: nn.Module
    name: str = "train"


@dataclass(frozen=True)
class Resume:
    """Where a stopped run stood within a task: ``epoch`` epochs of phase ``phase`` were done."""

    phase: int
    epoch: int
    learner: dict
    optimizer: dict
