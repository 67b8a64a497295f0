"""AutoAugment's policies for CIFAR-10 (Cubuk et al., 2019) and Cutout (DeVries and Taylor, 2017) on whole batches.

Does what PyCIL does with PIL for single images: each draws one of 25 policies of two operations, which leave gaps grey,
and then a black square half as wide as the image.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.batches.augmentation.augment import autocontrast, color, contrast, sharpness, solarize
from pycil_wsc.data.batches.augmentation.operations import Choices, Operation
from pycil_wsc.devices import widest_float
from pycil_wsc.lazy import Lazy

F: Any = Lazy("torchvision.transforms.v2.functional")

GREY = 128
RANGES = {  # values at magnitudes 0 and 9: shifts as fractions of the side, angles in degrees
    "ShearX": (0.0, 0.3),
    "ShearY": (0.0, 0.3),
    "TranslateX": (0.0, 150 / 331),
    "TranslateY": (0.0, 150 / 331),
    "Rotate": (0.0, 30.0),
    "Brightness": (0.0, 0.9),
    "Color": (0.0, 0.9),
    "Contrast": (0.0, 0.9),
    "Sharpness": (0.0, 0.9),
    "Posterize": (8.0, 4.0),
    "Solarize": (256.0, 0.0),
}


@functools.cache
def policies() -> Sequence[Any]:
    """torchvision's 25 policies: pairs of (operation, probability, magnitude in 0..9)."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    return AutoAugment(AutoAugmentPolicy.CIFAR10).policies


class AutoAugment:
    """The policies that the images of an epoch draw, and the centres of their squares.

    Args:
        batches: for each batch, its number of images, and the rows of them that are augmented here.
        seed: of all choices, which do not depend on the rows.
        device: where the images are.
    """

    def __init__(self, batches: Iterable[tuple[int, slice]], seed: int, device: torch.device) -> None:
        rng = np.random.default_rng([seed, 2])
        operations = []
        centres = [np.empty((0, 2))]
        self.rows: list[slice] = []  # the rows of each batch in `centres`
        first = 0
        for number, rows in batches:
            operations.append(list(drawn(rng, number, rows)))
            centres.append(rng.random((number, 2))[rows])
            self.rows.append(slice(first, first + len(centres[-1])))
            first = self.rows[-1].stop
        self.choices = Choices(OPERATIONS, operations, device)
        self.centres = torch.from_numpy(np.concatenate(centres).astype(np.float32)).to(device)

    def applied(self, images: Tensor, batch: int) -> Tensor:
        """The images of batch ``batch`` with their operations and squares: uint8 (B, H, W, C) -> the same shape."""
        centres = self.centres[self.rows[batch]] * images.shape[1]
        return cutout(self.choices.applied(images, batch), centres.long())


def drawn(rng: np.random.Generator, number: int, rows: slice) -> Iterator[tuple[str, float, np.ndarray]]:
    """Yield (operation, value, the images among ``rows`` that it changes), in the order in which they are applied."""
    chosen = rng.integers(len(policies()), size=number)[rows]
    chances = rng.random((2, number))[:, rows]
    negated = rng.random((2, number))[:, rows] < 0.5
    for layer in range(2):
        for policy, operations in enumerate(policies()):
            name, probability, magnitude = operations[layer]
            of_policy = (chosen == policy) & (chances[layer] < probability)
            for sign, side in ((1, ~negated[layer]), (-1, negated[layer])):
                images = np.flatnonzero(of_policy & side)
                if len(images):
                    yield name, sign * value_of(name, magnitude), images


def value_of(name: str, magnitude: int | None) -> float:
    """The value of an operation at ``magnitude`` 0..9; 0 for one that has none."""
    first, last = RANGES.get(name, (0.0, 0.0))
    return first + (last - first) * (magnitude or 0) / 9


def cutout(images: Tensor, centres: Tensor) -> Tensor:
    """Blacken a square, half as wide as the image, around the pixel ``centres`` (B, 2): uint8 (B, H, W, C) -> same."""
    side = images.shape[1]
    distances = torch.arange(side, device=images.device) - centres[..., None]  # (B, 2, side)
    inside = (distances >= -(side // 4)) & (distances < side // 4)
    black = inside[:, 0, :, None] & inside[:, 1, None, :]
    return images.masked_fill(black[..., None], 0)


def _sheared(maps, value):
    """Move (x + value * y, y) to (x, y) by PIL's cubic interpolation, in its double precision where there is one."""
    height, width = maps.shape[2:]
    kind = widest_float(maps.device)
    y = torch.arange(height, device=maps.device, dtype=kind)[:, None] + 0.5
    x = torch.arange(width, device=maps.device, dtype=kind) + 0.5 + value * y  # (H, W), in pixels
    left = (x - 0.5).floor()
    d = x - 0.5 - left
    taps = [_columns(maps, left.long() + tap).to(kind) for tap in (-1, 0, 1, 2)]
    v1, v2, v3, v4 = taps
    cubic = v2 + d * (v3 - v1 + d * (2 * (v1 - v2) + v3 - v4 + d * (v2 - v1 - v3 + v4)))
    return torch.where((x >= 0) & (x < width), cubic.clamp(0, 255).to(torch.uint8), GREY)


def _columns(maps, columns):
    """The pixels in ``columns`` (H, W) of the same row; the nearest ones where there are none."""
    columns = columns.clamp(0, maps.shape[3] - 1)
    return maps.gather(3, columns.expand(len(maps), maps.shape[1], -1, -1))


def _shifted(maps, value):
    """Move (x + value * width, y) to (x, y)."""
    height, width = maps.shape[2:]
    x = (torch.arange(width, device=maps.device) + 0.5 + value * width).expand(height, width)
    return torch.where((x >= 0) & (x < width), _columns(maps, x.floor().long()), GREY)


def _rotated(maps, degrees):
    """Rotate about the centre; the nearest pixel counts, by PIL's coordinates in fixed point, which has 16 bits."""
    height, width = maps.shape[2:]
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    left = width / 2 - (cos * width + sin * height) / 2 + (cos + sin) / 2  # the upper left pixel's place before
    top = height / 2 - (cos * height - sin * width) / 2 + (cos - sin) / 2
    left, top, cos, sin = (math.floor(value * 2**16 + 0.5) for value in (left, top, cos, sin))
    column = torch.arange(width, device=maps.device)
    row = torch.arange(height, device=maps.device)[:, None]
    x = (left + cos * column + sin * row) >> 16  # (H, W)
    y = (top + cos * row - sin * column) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    return torch.where(inside, maps.flatten(2)[:, :, places.flatten()].view_as(maps), GREY)


def _down(operation):
    """``operation`` along columns instead of rows."""
    return lambda maps, value: operation(maps.mT, value).mT


OPERATIONS: dict[str, Operation] = {  # with values that have a sign
    "AutoContrast": lambda maps, value: autocontrast(maps),
    "Equalize": lambda maps, value: F.equalize(maps),
    "Invert": lambda maps, value: F.invert(maps),
    "Posterize": lambda maps, value: F.posterize(maps, round(abs(value))),
    "Solarize": lambda maps, value: solarize(maps, abs(value)),
    "Brightness": lambda maps, value: F.adjust_brightness(maps, 1 + value),
    "Color": lambda maps, value: color(maps, 1 + value),
    "Contrast": lambda maps, value: contrast(maps, 1 + value),
    "Sharpness": lambda maps, value: sharpness(maps, 1 + value),
    "Rotate": _rotated,
    "ShearX": _sheared,
    "ShearY": _down(_sheared),
    "TranslateX": _shifted,
    "TranslateY": _down(_shifted),
}
