"""Learning-rate schedules and parameter groups from the configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pycil_wsc.training.options import OptimizerOptions, ScheduleOptions
from pycil_wsc.training.schedules import Schedule, cosine_lr, restarting_lr, step_lr, warmed_lr

Group = dict[str, Any]  # a parameter group of torch's optimisers


def task_schedule(config: ScheduleOptions, first: bool, epochs: int, interval: float) -> Schedule:
    """The learning rate in a task of ``epochs`` epochs, for a rate that is set every ``interval`` epochs.

    ``first``: whether this is the first task, whose keys begin with ``init``.
    """
    base, milestones, decay = (
        (config.init_lr, config.init_milestones, config.init_lr_decay)
        if first
        else (config.lrate, config.milestones, config.lrate_decay)
    )
    if config.scheduler == "cosine":
        schedule = cosine_lr(base, epochs, config.min_lr, config.warmup_epochs)
    elif config.scheduler == "restarts":
        schedule = restarting_lr(base, config.min_lr)
    else:
        schedule = step_lr(base, milestones, decay)
    return warmed_lr(schedule, config.warmup_epochs, interval)


def parameter_groups(
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
    depths: Mapping[nn.Parameter, int],
    config: OptimizerOptions,
) -> list[Group]:
    """The groups of the trainable ``parameters``, one for each ``lr_scale``, the factor of the learning rate.

    ``depths``: the distance of a parameter's layer from the head, at least 1; its factor is ``backbone_lr_factor *
    layer_decay ** depth``. Parameters that are not in ``depths`` have a factor of 1.
    """
    groups = {}
    for parameter in parameters:
        if parameter.requires_grad:
            depth = depths.get(parameter, 0)
            scale = config.backbone_lr_factor * config.layer_decay**depth if depth else 1.0
            groups.setdefault(scale, []).append(parameter)
    return [
        {"params": group, "lr": 0.0, "weight_decay": weight_decay, "lr_scale": scale} for scale, group in groups.items()
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def clip(optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Scale down all gradients if their total norm is above ``max_norm``. Does not synchronise with a GPU."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
