"""The floating-point precision of a run."""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping

import torch
from torch import nn

from pycil_wsc import seeding
from pycil_wsc.devices import computes_bf16, computes_bf16_natively
from pycil_wsc.errors import UserError
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.networks.timm_models import is_timm
from pycil_wsc.registry import backbones


class Precision:
    """The precision in which a learner computes: ``self.precision``.

    Args:
        wanted: ``fp32``, ``bf16`` or ``auto``.
        device: where it computes.
        undefined: tells whether gradients of the backbone would be undefined in bf16 on the CPU, which then computes in
            fp32; called once, if it matters.
    """

    def __init__(self, wanted: str, device: torch.device, undefined: Callable[[], bool]) -> None:
        self.wanted = wanted
        self.device = device
        self._undefined = undefined
        self._needs_fp32: bool | None = None  # not a cached property: before Python 3.12 these share a lock

    @property
    def name(self) -> str:
        """``fp32`` or ``bf16``."""
        return self.name_on(self.device)

    def name_on(self, device: torch.device) -> str:
        """:attr:`name` of a learner that was moved to ``device``."""
        name = resolved_precision(self.wanted, device)
        if name != "bf16" or device.type != "cpu":
            return name
        if self._needs_fp32 is None:
            self._needs_fp32 = self._undefined()
        return "fp32" if self._needs_fp32 else name

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context in which the network computes."""
        if self.name == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    @staticmethod
    def full(device: torch.device) -> contextlib.AbstractContextManager:
        """A context in which nothing that is computed on ``device`` is lowered, within :meth:`autocast` too."""
        lowered = torch.is_autocast_enabled(device.type)  # not in a program that is exported
        return torch.autocast(device.type, enabled=False) if lowered else contextlib.nullcontext()


def resolved_precision(precision: str, device: torch.device) -> str:
    """``auto`` becomes ``bf16`` where the device computes it natively, else ``fp32``.

    Raises :class:`UserError` if bf16 is asked of a device that does not have it.
    """
    if precision == "auto":
        return "bf16" if computes_bf16_natively(device) else "fp32"
    if precision == "bf16" and not computes_bf16(device):
        raise UserError(f"precision: torch has no bf16 on '{device}'; use fp32 or auto")
    return precision


def is_undefined_in_bf16(name: str, options: Mapping[str, object], side: int) -> bool:
    """Whether gradients of the backbone ``name`` with these ``options`` are undefined in bf16 on the CPU.

    It is built for this, once a process. ``side``: that of its images.
    """
    registered = None if is_timm(name) else backbones[name]  # another one may take the name
    return _probed(name, registered, json.dumps(options, sort_keys=True), side)


@functools.lru_cache
def _probed(name: str, registered: object, options: str, side: int) -> bool:
    with seeding.seeded(0, "probe"):  # does not advance the generator of the weights
        return undefined_in_bf16(make_backbone(name, json.loads(options), image_size=side), side)


@torch.no_grad()
def undefined_in_bf16(backbone: nn.Module, side: int) -> bool:
    """Whether torch leaves gradients of ``backbone`` undefined in bf16 on the CPU, for images of (3, side, side).

    oneDNN does not write all elements of the gradient of a padded convolution whose input is smaller than its stride,
    such as a 1x1 map under a 3x3 kernel with stride 2; the others are uninitialised memory.
    """
    uncovered = []

    def check(module, inputs):
        uncovered.extend(
            size < stride and bool(padding)
            for size, stride, padding in zip(inputs[0].shape[2:], module.stride, module.padding)
        )

    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(check)
    backbone.eval()(torch.zeros(1, 3, side, side))
    return any(uncovered)
