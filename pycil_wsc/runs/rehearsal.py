"""A step of training on two images: what an accelerator cannot do is found before the first task, not within it."""

import logging
from typing import Any

import torch

from pycil_wsc.devices import widest_float
from pycil_wsc.engine.prediction import best_classes
from pycil_wsc.errors import UserError, first_line


def rehearse(learner: Any) -> None:
    """Augment two images and train a new backbone of ``learner`` on them for a step, as a run does.

    Raises :class:`UserError` if the device lacks an operator or a dtype. The CPU lacks none. Leaves no trace, since all
    random numbers have an address of their own.
    """
    device, config = learner.device, learner.config
    if device.type == "cpu":
        return
    try:
        with learner.seeded("rehearsal", device=device):
            _step(learner)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:  # a NotImplementedError is a RuntimeError
        raise UserError(
            f"device: '{device}' cannot train '{config.convnet_type}' in {learner.precision} ({first_line(error)}); "
            "try another precision, or --device cpu"
        ) from error
    if config.analyse and widest_float(device) != torch.float64:
        logging.getLogger("pycil_wsc").warning("analyse: '%s' has no float64; sums are in float32", device)


def _step(learner: Any) -> None:
    config, targets = learner.config, learner.manager.train_targets
    backbone = learner.new_backbone(pretrained=False)
    memory_format = torch.channels_last if config.channels_last else torch.preserve_format
    backbone.to(learner.device, memory_format=memory_format)
    optimizer = learner.optimizer(backbone.parameters(), config.weight_decay)
    two = learner.manager.tasks[0].train_indices[:2]
    for images, _ in learner.train_source.batches(two, targets, 2, train=True):
        with learner.autocast():
            features = backbone(images)
        features.float().square().mean().backward()
        optimizer.step()
        best_classes(features.detach())
