"""The layers of a backbone in order, for layer-wise learning rates, and its frozen parts."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.networks import timm_models


def layer_groups(part: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a backbone, or of a part of it, grouped by layer from the input on.

    timm's models define their layers, and so may others; the layers of other modules are their children.
    """
    own_groups: Any = getattr(part, "layer_groups", None)
    if own_groups is not None:
        return own_groups()
    if hasattr(part, "group_matcher"):
        return timm_models.layer_groups(part)
    groups = [list(part.parameters(recurse=False)), *(list(child.parameters()) for child in part.children())]
    return [group for group in groups if group]


def depths(parts: Iterable[nn.Module]) -> dict[nn.Parameter, int]:
    """The distance of each parameter of the consecutive ``parts`` from the head, in layers; 1 is next to the head."""
    groups = [group for part in parts for group in layer_groups(part)]
    return {parameter: len(groups) - index for index, group in enumerate(groups) for parameter in group}


def mark_frozen(backbone: nn.Module, names: Iterable[str]) -> None:
    """Mark the frozen parts of ``backbone``. Its copies and split parts keep the marks.

    ``names``: names of modules or parameters, as in ``named_modules()`` and ``named_parameters()``, or ``backbone`` for
    all. Raises :class:`UserError` for an unknown name.
    """
    modules, parameters = dict(backbone.named_modules()), dict(backbone.named_parameters())
    for name in names:
        module = backbone if name == "backbone" else modules.get(name) if name else None
        if module is None and name not in parameters:
            known = [*modules, *parameters] if "." in name else [child for child, _ in backbone.named_children()]
            raise UserError(f"freeze: the backbone has no part '{name}'{did_you_mean(name, known)}")
        if module is None:
            place, _, attribute = name.rpartition(".")
            owner = modules[place]
            vars(owner)["frozen_parameters"] = {attribute, *getattr(owner, "frozen_parameters", ())}
            continue
        for part in module.modules():
            own_names = {attribute for attribute, _ in part.named_parameters(recurse=False)}
            vars(part).update(frozen=True, frozen_parameters=own_names)


def freeze(network: nn.Module) -> None:
    """Turn off gradients of the parameters that are marked in ``network``."""
    for module in network.modules():
        for name in getattr(module, "frozen_parameters", ()):
            module.get_parameter(name).requires_grad_(False)


def eval_frozen(network: nn.Module) -> None:
    """Set modules that are frozen as a whole to evaluation mode, so that batch norm keeps its statistics."""
    for module in network.modules():
        if getattr(module, "frozen", False):
            module.training = False
