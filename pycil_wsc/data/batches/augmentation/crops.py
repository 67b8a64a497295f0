"""Batched random resized crops of images of different sizes, as in torchvision's ``RandomResizedCrop``."""

import math

import numpy as np
import torch
from torch import Tensor

SCALE, RATIO, ATTEMPTS = 0.08, (3 / 4, 4 / 3), 10  # torchvision's defaults


def boxes(sizes: np.ndarray, side: int, rng: np.random.Generator | None, scale: float = SCALE) -> np.ndarray:
    """:func:`random_boxes` if ``rng`` is given, otherwise :func:`centre_boxes`."""
    return centre_boxes(sizes, side) if rng is None else random_boxes(sizes, rng, scale)


def random_boxes(sizes: np.ndarray, rng: np.random.Generator, scale: float = SCALE) -> np.ndarray:
    """Draw a box for each image, distributed as in ``RandomResizedCrop.get_params``.

    The box's area, as a fraction of the image's, is uniform between ``scale`` and 1, and the logarithm of its width
    over height is uniform within that of ``RATIO``. The first of ``ATTEMPTS`` boxes that fits is used; if none fits,
    the largest centred box with an allowed ratio.

    Args:
        sizes: int (N, 2), height and width of the images.
        rng: source of the random numbers.
        scale: the smallest area.

    Returns:
        int64 (N, 4): top, left, height and width.
    """
    number, full = len(sizes), sizes[:, :1].astype(float) * sizes[:, 1:]
    area = full * rng.uniform(scale, 1, (number, ATTEMPTS))
    narrowest, widest = map(math.log, RATIO)
    ratio = np.exp(rng.uniform(narrowest, widest, (number, ATTEMPTS)))
    width, height = np.round(np.sqrt(area * ratio)).astype(int), np.round(np.sqrt(area / ratio)).astype(int)
    fits = np.logical_and.reduce([width > 0, width <= sizes[:, 1:], height > 0, height <= sizes[:, :1]])
    first = (np.arange(number), fits.argmax(1))
    extent = np.where(fits.any(1)[:, None], np.stack([height[first], width[first]], 1), _largest(sizes))
    places = np.floor(rng.random((number, 2)) * (sizes - extent + 1)).astype(int)
    centred = (sizes - extent) // 2
    return np.concatenate([np.where(fits.any(1)[:, None], places, centred), extent], 1)


def _largest(sizes):
    """Height and width of the largest box with an allowed ratio."""
    height, width = sizes[:, 0], sizes[:, 1]
    ratio = width / height
    return np.stack(
        [
            np.where(ratio < RATIO[0], np.round(width / RATIO[0]), height).astype(int),
            np.where(ratio > RATIO[1], np.round(height * RATIO[1]), width).astype(int),
        ],
        1,
    )


def centre_boxes(sizes: np.ndarray, side: int) -> np.ndarray:
    """The boxes of ``CenterCrop(side)`` for images of at least that size: int64 (N, 4)."""
    places = np.round((sizes - side) / 2).astype(int)
    return np.concatenate([places, np.full_like(places, side)], 1)


class Crops:
    """A box of each image of an epoch, all copied to the device at once.

    Args:
        starts: int64 (N,), the first pixel of each image among those of all images.
        widths: int64 (N,), the widths of the whole images.
        boxes: (N, 4): top, left, height and width.
        device: where the pixels are.
    """

    def __init__(self, starts: np.ndarray, widths: np.ndarray, boxes: np.ndarray, device: torch.device) -> None:
        self.extents = boxes[:, 2:]
        self.numbers = torch.from_numpy(np.column_stack([starts, widths, boxes])).to(device)

    def of(self, pixels: Tensor, batch: slice, rows: slice, side: int, interpolation: str) -> Tensor:
        """The boxes of the ``rows`` of a batch, resized with antialiasing: uint8 (B, side, side, 3).

        Equal to torchvision's ``resize`` up to rounding. Each image is multiplied by a matrix of interpolation weights
        horizontally, then vertically.

        Args:
            pixels: uint8 (pixels, 3), the pixels of all images, concatenated.
            batch: the place of the batch in the epoch.
            rows: those of the batch that are wanted.
            side: height and width of the result.
            interpolation: ``bilinear``; any other value means bicubic, as in :func:`~.augment.resize`.
        """
        extents = self.extents[batch][rows]
        if not len(extents):
            return pixels.new_empty(0, side, side, 3)
        most = extents.max(0).tolist()
        start, width, top, left, box_height, box_width = self.numbers[batch][rows][:, :, None].unbind(1)
        down = torch.arange(most[0], device=pixels.device).clamp(max=box_height - 1) + top  # (B, rows)
        across = torch.arange(most[1], device=pixels.device).clamp(max=box_width - 1) + left  # (B, columns)
        crops = pixels[(start + down * width)[:, :, None] + across[:, None, :]].float()  # (B, rows, columns, 3)
        kernel = _triangle if interpolation == "bilinear" else _cubic
        vertical = _weights(box_height, side, most[0], kernel)
        horizontal = _weights(box_width, side, most[1], kernel)
        with torch.autocast(pixels.device.type, enabled=False):  # whatever the network computes in
            narrow = torch.einsum("bxw,bywc->byxc", horizontal, crops).clamp_(0, 255)  # (B, rows, side, 3)
            result = (vertical @ narrow.flatten(2)).view(len(crops), side, side, 3)
        return result.round_().clamp_(0, 255).to(torch.uint8)


def _triangle(distance):
    return (1 - distance).clamp(min=0)


def _cubic(distance):
    """The bicubic kernel (Keys, 1981) with a = -0.5, as in PIL."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def _weights(length, side, most, kernel):
    """Interpolation weights from the first ``length`` (B, 1) of ``most`` pixels to ``side`` pixels: (B, side, most)."""
    scale = (length / side)[:, :, None]  # (B, 1, 1)
    centre = (torch.arange(side, device=length.device)[:, None] + 0.5) * scale  # (B, side, 1)
    position = torch.arange(most, device=length.device) + 0.5
    weights = kernel((position - centre).abs() / scale.clamp(min=1)) * (position < length[:, :, None])
    return weights / weights.sum(2, keepdim=True)
