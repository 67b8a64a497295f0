"""A phase of training within a task, and the position at which a stopped run resumes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Phase:
    """A phase of training within a task: ``epochs`` passes over ``indices`` of the training set with one optimiser.

    ``lr`` maps the epoch to the learning rate; ``loss`` is (images, targets) -> (loss, logits); ``network`` is the only
    part in training mode; ``name`` is for the progress bar; ``mixed``: batches follow ``replay_ratio``.
    """

    epochs: int
    optimizer: torch.optim.Optimizer
    lr: Callable
    indices: np.ndarray
    loss: Callable
    network: nn.Module
    name: str = "train"
    mixed: bool = True


@dataclass(frozen=True)
class Resume:
    """The state from which a stopped run resumes within a task, after ``epoch`` epochs of phase ``phase``."""

    phase: int
    epoch: int
    learner: dict
    optimizer: dict
