"""RandAugment (Cubuk et al., 2020) on whole batches, as timm has it.

Does what ``rand-m9-mstd0.5-inc1`` of ``timm.data.create_transform`` does for single images, on the device, with
torchvision's batched functions. Random choices are drawn on the host. Images of a batch that draw the same operation
share its magnitude; their signs are independent.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from pycil_wsc.data.batches.augmentation.augment import autocontrast, color, contrast, sharpness, solarize
from pycil_wsc.data.batches.augmentation.operations import Choices, Operation
from pycil_wsc.lazy import Lazy

F: Any = Lazy("torchvision.transforms.v2.functional")

LAYERS, PROBABILITY, MAGNITUDE, MAGNITUDE_STD = 2, 0.5, 9.0, 0.5  # timm's rand-m9-mstd0.5-inc1; magnitudes are 0..10
GREY = 128.0  # fill value of geometric operations


class RandAugment:
    """The operations that the images of an epoch draw: two each, of which each is applied with probability 0.5.

    Args:
        batches: for each batch, its number of images, and the rows of them that are augmented here.
        seed: of all choices, which do not depend on the rows.
        device: where the images are.
    """

    def __init__(self, batches: Iterable[tuple[int, slice]], seed: int, device: torch.device) -> None:
        operations = []
        for batch, (number, rows) in enumerate(batches):
            operations.append(list(drawn(np.random.default_rng([seed, 2, batch]), number, rows)))
        self.choices = Choices(OPERATIONS, operations, device)

    def applied(self, images: Tensor, batch: int) -> Tensor:
        """The images of batch ``batch`` with their operations: uint8 (B, H, W, C) -> the same shape."""
        return self.choices.applied(images, batch)


def drawn(rng: np.random.Generator, number: int, rows: slice) -> Iterator[tuple[str, float, np.ndarray]]:
    """Yield (operation, magnitude, the images among ``rows`` that it changes), in the order in which they are applied.

    ``rows`` are those of a batch of ``number`` images, for which all is drawn.
    """
    names = list(OPERATIONS)
    for _ in range(LAYERS):
        chosen = rng.integers(len(names), size=number)[rows]
        applied = rng.random(number)[rows] < PROBABILITY
        negated = rng.random(number)[rows] < 0.5
        levels = np.clip(rng.normal(MAGNITUDE, MAGNITUDE_STD, len(names)), 0, 10) / 10
        for operation, (name, level) in enumerate(zip(names, levels)):
            of_operation = (chosen == operation) & applied
            for sign, side in ((-1, negated), (1, ~negated)):
                images = np.flatnonzero(of_operation & side)
                if len(images):
                    yield name, float(sign * level), images


def _enhanced(adjust: Operation) -> Operation:
    """The operation ``adjust`` with a factor of 1 + 0.9 * level, at least 0.1; a factor of 1 changes nothing."""
    return lambda maps, level: adjust(maps, max(0.1, 1 + 0.9 * level))


def _affine(maps, a=1.0, b=0.0, c=0.0, d=0.0, e=1.0, f=0.0):
    """Move (a x + b y + c, d x + e y + f) to (x, y); coordinates are fractions of the side from the upper left."""
    height, width = maps.shape[2:]
    y = (torch.arange(height, device=maps.device)[:, None] + 0.5) / height
    x = (torch.arange(width, device=maps.device) + 0.5) / width
    places = 2 * torch.stack([a * x + b * y + c, d * x + e * y + f], -1) - 1  # (H, W, 2), in -1..1
    grid = places.expand(len(maps), -1, -1, -1)
    moved = grid_sample(maps.float() - GREY, grid, "bilinear", align_corners=False)  # 0 outside
    return (moved + GREY).round_().to(torch.uint8)


def _rotate(maps, level):
    """Rotate about the centre by up to 30 degrees."""
    angle = -math.radians(30 * level)
    cos, sin = math.cos(angle), math.sin(angle)
    return _affine(maps, cos, sin, (1 - cos - sin) / 2, -sin, cos, (1 + sin - cos) / 2)


def _solarize_add(maps, level):
    added = maps.to(torch.int16) + int(110 * abs(level))
    return torch.where(maps < 128, added.clamp(max=255).to(torch.uint8), maps)


OPERATIONS: dict[str, Operation] = {  # with magnitudes in -1..1; timm's "increasing"
    "AutoContrast": lambda maps, level: autocontrast(maps),
    "Equalize": lambda maps, level: F.equalize(maps),
    "Invert": lambda maps, level: F.invert(maps),
    "Rotate": _rotate,
    "PosterizeIncreasing": lambda maps, level: F.posterize(maps, 4 - int(4 * abs(level))),
    "SolarizeIncreasing": lambda maps, level: solarize(maps, 256 - min(256, int(256 * abs(level)))),
    "SolarizeAdd": _solarize_add,
    "ColorIncreasing": _enhanced(color),
    "ContrastIncreasing": _enhanced(contrast),
    "BrightnessIncreasing": _enhanced(lambda maps, factor: F.adjust_brightness(maps, factor)),
    "SharpnessIncreasing": _enhanced(sharpness),
    "ShearX": lambda maps, level: _affine(maps, b=0.3 * level),
    "ShearY": lambda maps, level: _affine(maps, d=0.3 * level),
    "TranslateXRel": lambda maps, level: _affine(maps, c=0.45 * level),
    "TranslateYRel": lambda maps, level: _affine(maps, f=0.45 * level),
}
