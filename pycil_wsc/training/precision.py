"""The floating-point precision of a run."""

import torch
from torch import nn

from pycil_wsc.devices import computes_bf16, computes_bf16_natively
from pycil_wsc.errors import UserError


def resolved_precision(precision: str, device: torch.device) -> str:
    """``auto`` becomes ``bf16`` where the device computes it natively, else ``fp32``.

    Raises :class:`UserError` if bf16 is asked of a device that does not have it.
    """
    if precision == "auto":
        return "bf16" if computes_bf16_natively(device) else "fp32"
    if precision == "bf16" and not computes_bf16(device):
        raise UserError(f"precision: torch has no bf16 on '{device}'; use fp32 or auto")
    return precision


@torch.no_grad()
def undefined_in_bf16(backbone: nn.Module, side: int) -> bool:
    """Whether torch leaves gradients of ``backbone`` undefined in bf16 on the CPU, for images of (3, side, side).

    oneDNN does not write all elements of the gradient of a padded convolution whose input is smaller than its stride,
    such as a 1x1 map under a 3x3 kernel with stride 2; the others are uninitialised memory.
    """
    found = []

    def check(module, inputs):
        found.extend(
            size < stride and bool(padding)
            for size, stride, padding in zip(inputs[0].shape[2:], module.stride, module.padding)
        )

    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(check)
    backbone.eval()(torch.zeros(1, 3, side, side))
    return any(found)
