"""RandAugment (Cubuk et al., 2020) on whole batches, as timm has it.

Does what ``rand-m9-mstd0.5-inc1`` of ``timm.data.create_transform`` does for single images, on the device, with
torchvision's batched functions. Random choices are drawn on the host. Images of a batch that draw the same operation
share its magnitude; their signs are independent.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

LAYERS, PROBABILITY, MAGNITUDE, MAGNITUDE_STD = 2, 0.5, 9.0, 0.5  # timm's rand-m9-mstd0.5-inc1; magnitudes are 0..10
GREY = 128.0  # fill value of geometric operations


def rand_augment(
    images: Tensor, rng: np.random.Generator, whole: int | None = None, rows: slice = slice(None)
) -> Tensor:
    """Draw two operations per image and apply each with probability 0.5: uint8 (B, H, W, C) -> the same shape.

    ``images`` may be the ``rows`` of a batch of ``whole`` images; the operations are then drawn for the whole batch.
    """
    whole = len(images) if whole is None else whole
    maps, names = images.permute(0, 3, 1, 2).contiguous(), list(OPERATIONS)
    for _ in range(LAYERS):
        chosen = rng.integers(len(names), size=whole)[rows]
        applied, negated = (rng.random(whole)[rows] < share for share in (PROBABILITY, 0.5))
        levels = np.clip(rng.normal(MAGNITUDE, MAGNITUDE_STD, len(names)), 0, 10) / 10
        for number, (name, level) in enumerate(zip(names, levels)):
            for sign in (-1, 1):
                members = np.flatnonzero((chosen == number) & applied & (negated == (sign < 0)))
                if len(members):
                    index = torch.from_numpy(members).to(maps.device, non_blocking=True)
                    with torch.autocast(maps.device.type, enabled=False):  # whatever the network computes in
                        maps[index] = OPERATIONS[name](maps[index], float(sign * level))
    return maps.permute(0, 2, 3, 1)


def _enhanced(adjust: Callable) -> Callable[[Tensor, float], Tensor]:
    """The operation ``adjust`` with a factor of 1 + 0.9 * level, at least 0.1; a factor of 1 changes nothing."""
    return lambda maps, level: adjust(maps, max(0.1, 1 + 0.9 * level))


def _affine(maps, a=1.0, b=0.0, c=0.0, d=0.0, e=1.0, f=0.0):
    """Move (a x + b y + c, d x + e y + f) to (x, y); coordinates are fractions of the side from the upper left."""
    theta = torch.tensor([[a, b, a + b + 2 * c - 1], [d, e, d + e + 2 * f - 1]])
    theta = theta.to(maps.device, non_blocking=True)
    grid = torch.nn.functional.affine_grid(theta.expand(len(maps), 2, 3), list(maps.shape), align_corners=False)
    moved = torch.nn.functional.grid_sample(maps.float() - GREY, grid, "bilinear", align_corners=False)  # 0 outside
    return (moved + GREY).round_().to(torch.uint8)


def _rotate(maps, level):
    """Rotate about the centre by up to 30 degrees."""
    angle = -math.radians(30 * level)
    cos, sin = math.cos(angle), math.sin(angle)
    return _affine(maps, cos, sin, (1 - cos - sin) / 2, -sin, cos, (1 + sin - cos) / 2)


def _solarize_add(maps, level):
    added = maps.to(torch.int16) + int(110 * abs(level))
    return torch.where(maps < 128, added.clamp(max=255).to(torch.uint8), maps)


OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {  # uint8 (B, C, H, W), magnitude -1..1; timm's "increasing"
    "AutoContrast": lambda maps, level: F.autocontrast(maps),
    "Equalize": lambda maps, level: F.equalize(maps),
    "Invert": lambda maps, level: F.invert(maps),
    "Rotate": _rotate,
    "PosterizeIncreasing": lambda maps, level: F.posterize(maps, 4 - int(4 * abs(level))),
    "SolarizeIncreasing": lambda maps, level: F.solarize(maps, 256 - min(256, int(256 * abs(level)))),
    "SolarizeAdd": _solarize_add,
    "ColorIncreasing": _enhanced(F.adjust_saturation),
    "ContrastIncreasing": _enhanced(F.adjust_contrast),
    "BrightnessIncreasing": _enhanced(F.adjust_brightness),
    "SharpnessIncreasing": _enhanced(F.adjust_sharpness),
    "ShearX": lambda maps, level: _affine(maps, b=0.3 * level),
    "ShearY": lambda maps, level: _affine(maps, d=0.3 * level),
    "TranslateXRel": lambda maps, level: _affine(maps, c=0.45 * level),
    "TranslateYRel": lambda maps, level: _affine(maps, f=0.45 * level),
}
