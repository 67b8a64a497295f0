"""Batched augmentation: pure functions of a uint8 batch and random choices, equal to torchvision's for these choices.

CIFAR images are augmented as in PyCIL (torchvision on PIL images): zero padding and random crop, horizontal flip,
brightness as in ``ColorJitter`` (8-bit, truncating), then scaling to 0..1 and normalisation.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d


def random_crop_flip(images: Tensor, padding: int, flip: bool, generator: Generator | None) -> Tensor:
    """Zero-pad, crop at random to the original size and flip at random: uint8 (B, H, W, C) -> the same shape."""
    return crop_flip(images, padding, *random_places(len(images), padding, flip, generator, images.device))


def random_places(
    number: int, padding: int, flip: bool, generator: Generator | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, columns and mirrors of :func:`crop_flip` for ``number`` images: each (number,).

    Rows and columns are uniform in 0..2*padding. With ``flip``, each image is flipped with probability 0.5.
    """
    top = torch.randint(0, 2 * padding + 1, (number,), generator=generator, device=device)
    left = torch.randint(0, 2 * padding + 1, (number,), generator=generator, device=device)
    mirror = coins(number, generator, device) if flip else torch.zeros(number, dtype=torch.bool, device=device)
    return top, left, mirror


def crop_flip(images: Tensor, padding: int, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    """Crop each zero-padded image at row ``top`` and column ``left``, and flip it where ``mirror``: all (B,)."""
    batch, height, width, _ = images.shape
    padded = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding)) if padding else images
    rows = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = torch.arange(width, device=images.device).expand(batch, width)
    columns = left[:, None] + torch.where(mirror[:, None], width - 1 - columns, columns)  # (B, W)
    index = torch.arange(batch, device=images.device)
    return padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]


def random_brightness(images: Tensor, strength: float, generator: Generator | None) -> Tensor:
    """``ColorJitter(brightness=strength)`` of uint8 images (B, H, W, C): the same shape."""
    return brightness(images, random_factors(len(images), strength, generator, images.device))


def random_factors(number: int, strength: float, generator: Generator | None, device: torch.device) -> Tensor:
    """Factors of :func:`brightness` for ``number`` images, uniform in 1 +- ``strength``: (number,)."""
    factors = torch.empty(number, device=device)
    return factors.uniform_(max(0, 1 - strength), 1 + strength, generator=generator)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """``floor(clip(image * factor, 0, 255))``, PIL's 8-bit blend with black; ``factor`` is (B,)."""
    scaled = images * factor.view(-1, *[1] * (images.dim() - 1))
    return scaled.clamp_(0, 255).to(torch.uint8)


def coins(number: int, generator: Generator | None, device: torch.device) -> Tensor:
    """Fair coin flips: bool (number,)."""
    return torch.rand(number, generator=generator, device=device) < 0.5


def flip(images: Tensor, mirror: Tensor) -> Tensor:
    """Flip the images (B, H, W, C) horizontally where ``mirror`` (B,)."""
    return torch.where(mirror[:, None, None, None], images.flip(2), images)


def autocontrast(maps: Tensor) -> Tensor:
    """Stretch each channel to 0..255: uint8 (B, C, H, W) -> the same shape.

    Equals torchvision's, which assigns by masks, for which the host synchronises.
    """
    low = maps.amin((2, 3), keepdim=True).float()
    scale = (maps.amax((2, 3), keepdim=True) - low) * (1 / 255)
    flat = scale == 0  # channels of one value stay
    return ((maps - low.where(~flat, 0.0)) / scale.where(~flat, 1.0)).clamp_(0, 255).to(torch.uint8)


def sharpness(maps: Tensor, factor: float) -> Tensor:
    """Blend with the smoothed image, as PIL does; the border stays: uint8 (B, C, H, W) -> the same shape.

    torchvision's copies its kernel to the device at each call.
    """
    smooth = maps.float()
    inner = smooth[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = ((9 * avg_pool2d(smooth, 3, 1) + 4 * inner) / 13).round()
    return (smooth + factor * (maps - smooth)).clamp(0, 255).to(torch.uint8)


def resize(images: Tensor, side: int, interpolation: str) -> Tensor:
    """uint8 (B, H, W, C) -> float32 (B, side, side, C) in 0..255, equal to PIL's resize up to rounding.

    ``interpolation``: ``bilinear`` or ``bicubic``, both with antialiasing. timm's other modes are treated as bicubic.
    """
    mode = "bilinear" if interpolation == "bilinear" else "bicubic"
    if not len(images):
        return images.new_empty(0, side, side, images.shape[3], dtype=torch.float32)
    maps = images.permute(0, 3, 1, 2).float()
    resized = torch.nn.functional.interpolate(maps, (side, side), mode=mode, antialias=True)
    return resized.clamp_(0, 255).permute(0, 2, 3, 1)


class Normalise:
    """0..255 (B, H, W, C) -> float32 (B, C, H, W), channels-last in memory: ``(image / 255 - mean) / std``."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        centre = torch.tensor(mean, dtype=torch.float64)
        width = torch.tensor(std, dtype=torch.float64)
        self.scale = (1 / (255 * width)).float().to(device)
        self.shift = (-centre / width).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale).permute(0, 3, 1, 2)
