"""Parameter groups of optimisers: from the configuration, their learning rates, and the norm of their gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pycil_wsc.training.learner_config import OptimizerOptions

Group = dict[str, Any]  # a parameter group of torch's optimisers


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


def apart(groups: Iterable[Group], parameters: Iterable[nn.Parameter], others: float = 1.0) -> list[Group]:
    """``groups``, with ``parameters`` in groups of their own; the rate of the rest is ``others`` times as large.

    torch's fused SGD needs groups whose parameters have all had a gradient, or none of them.
    """
    chosen = set(parameters)
    divided = []
    for group in groups:
        settings = {name: group[name] for name in ("lr", "weight_decay", "lr_scale")}
        rest = [parameter for parameter in group["params"] if parameter not in chosen]
        selected = [parameter for parameter in group["params"] if parameter in chosen]
        if rest:
            divided.append({**settings, "params": rest, "lr_scale": others * group["lr_scale"]})
        if selected:
            divided.append({**settings, "params": selected})
    return divided


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def clip(optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Scale down all gradients if their total norm is above ``max_norm``. Does not synchronise with a GPU."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
