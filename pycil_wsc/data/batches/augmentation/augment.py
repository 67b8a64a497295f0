"""Batched augmentation: pure functions of a uint8 batch and random choices, equal to torchvision's for these choices.

CIFAR images are augmented as in PyCIL (torchvision on PIL images): zero padding and random crop, horizontal flip,
brightness as in ``ColorJitter`` (8-bit, truncating), then scaling to 0..1 and normalisation.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d

from pycil_wsc.devices import widest_float


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
    """Stretch each channel to 0..255, as PIL does: uint8 (B, C, H, W) -> the same shape.

    PIL computes in double precision and truncates, so that a level that is an integer may become the one below. On a
    device without float64 a few levels therefore differ by one.
    """
    low = maps.amin((2, 3), keepdim=True).to(widest_float(maps.device))
    width = maps.amax((2, 3), keepdim=True) - low
    flat = width == 0  # channels of one value stay
    scale = torch.full_like(width, 255).div(width)  # torch's `255 / width` multiplies by a rounded reciprocal
    scale = scale.where(~flat, 1.0)
    offset = (-low * scale).where(~flat, 0.0)
    return (maps * scale + offset).clamp_(0, 255).to(torch.uint8)


def color(maps: Tensor, factor: float) -> Tensor:
    """PIL's ``Color``, a blend with the image in grey: uint8 (B, 3, H, W) -> the same shape."""
    return _blended(grey(maps), maps, factor)


def contrast(maps: Tensor, factor: float) -> Tensor:
    """PIL's ``Contrast``, a blend with the mean of the image in grey: uint8 (B, 3, H, W) -> the same shape."""
    pixels = maps.shape[2] * maps.shape[3]
    total = grey(maps).sum((2, 3), keepdim=True)
    mean = (2 * total + pixels) // (2 * pixels)  # rounded half up
    return _blended(mean, maps, factor)


def sharpness(maps: Tensor, factor: float) -> Tensor:
    """PIL's ``Sharpness``, a blend with the smoothed image, whose border stays: uint8 (B, C, H, W) -> the same shape.

    torchvision's copies its kernel to the device at each call.
    """
    smooth = maps.float()
    inner = smooth[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = ((9 * avg_pool2d(smooth, 3, 1) + 4 * inner) / 13).round()
    return _blended(smooth, maps, factor)


def solarize(maps: Tensor, threshold: float) -> Tensor:
    """Invert the values from ``threshold``, 0..256, on: uint8 (B, C, H, W) -> the same shape."""
    return torch.where(maps < threshold, maps, 255 - maps)


def grey(maps: Tensor) -> Tensor:
    """Luma in PIL's fixed-point arithmetic: uint8 (B, 3, H, W) -> int32 (B, 1, H, W)."""
    red, green, blue = maps.to(torch.int32).split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16


def _blended(degenerate, maps, factor):
    """PIL's blend of a degenerate image, in 0..255, with the image, which truncates."""
    degenerate = degenerate.float()
    return (degenerate + factor * (maps - degenerate)).clamp(0, 255).to(torch.uint8)


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


def centred(images: Tensor, resized: int, side: int, interpolation: str) -> Tensor:
    """torchvision's ``Resize(resized)`` and ``CenterCrop(side)``: uint8 (B, H, H, C) -> (B, side, side, C).

    The pixels are whole numbers, up to one level from PIL's; float32 unless the size is right already.
    """
    if images.shape[1] != resized:
        images = resize(images, resized, interpolation).round_()
    start = round((resized - side) / 2)
    return images[:, start : start + side, start : start + side]


class Normalise:
    """0..255 (B, H, W, C) -> float32 (B, C, H, W), channels-last in memory: ``(image / 255 - mean) / std``."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        centre = torch.tensor(mean, dtype=torch.float64)
        width = torch.tensor(std, dtype=torch.float64)
        self.scale = (1 / (255 * width)).float().to(device)
        self.shift = (-centre / width).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale).permute(0, 3, 1, 2)
