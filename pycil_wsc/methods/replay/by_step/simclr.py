"""Strong augmentation for contrastive losses (SimCLR, Chen et al., 2020), with the strengths of Mammoth's X-DER.

Pure functions of images on the 0..1 scale and of numbers drawn uniformly from 0..1, each equal to torchvision's for
tensors, image by image. Values are not rounded to 8 bits in between, as those of PIL's images are.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

ATTEMPTS = 10  # boxes that are tried, as in torchvision
SCALE, RATIO = 0.2, (3 / 4, 4 / 3)  # of a box: the least area as a fraction, and width over height
JITTER = 0.4  # of brightness, contrast and saturation
HUE = 0.1  # as a fraction of the circle
FLIPPED, JITTERED, GREY = 0.5, 0.8, 0.2  # probabilities
LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue in grey, as in torchvision
CHANGES = 4  # of the colours: brightness, contrast, saturation and hue
NUMBERS = 2 * ATTEMPTS + 2 + 2 * CHANGES + 3  # drawn for each image


def strongly_augmented(images: Tensor, drawn: Tensor) -> Tensor:
    """Flip, crop and resize, change the colours, and turn grey, each by chance.

    Args:
        images: float32 (B, 3, S, S) on the 0..1 scale.
        drawn: float32 (B, ``NUMBERS``), uniform in 0..1.

    Returns:
        (B, 3, S, S) on the 0..1 scale.
    """
    if not len(images):
        return images
    sizes = [ATTEMPTS, ATTEMPTS, 2, CHANGES, CHANGES, 3]
    areas, ratios, places, factors, order, (flipped, jittered, grey_) = _split(drawn, sizes)
    images = _where(flipped < FLIPPED, images.flip(3), images)
    images = cropped(images, boxes(images.shape[3], areas, ratios, places))
    changes = (1 + JITTER * (2 * factors[:, :3] - 1), HUE * (2 * factors[:, 3:] - 1))
    changed = recoloured(images, torch.cat(changes, 1), order.argsort(1))
    images = _where(jittered < JITTERED, changed, images)
    return _where(grey_ < GREY, grey(images).expand_as(images), images)


def _split(drawn, sizes):
    *parts, last = drawn.split(sizes, 1)
    return *parts, last.unbind(1)


def _where(chosen, images, others):
    """``images`` where ``chosen`` (B,), else ``others``."""
    return torch.where(chosen[:, None, None, None], images, others)


def boxes(side: int, areas: Tensor, ratios: Tensor, places: Tensor) -> Tensor:
    """Boxes in images of this ``side``, as ``RandomResizedCrop`` draws them: top, left, height and width, each (B, 1).

    The first of the boxes with such ``areas`` and ``ratios``, (B, ``ATTEMPTS``), that fits; if none does, the whole
    image. ``places``: (B, 2), of its corner, top and left.
    """
    area = side * side * (SCALE + (1 - SCALE) * areas)
    narrowest, widest = map(math.log, RATIO)
    ratio = (narrowest + (widest - narrowest) * ratios).exp()
    widths = (area * ratio).sqrt().round()
    heights = (area / ratio).sqrt().round()
    fits = (widths <= side) & (heights <= side)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    none = ~fits.any(1, keepdim=True)
    height = heights.gather(1, first).masked_fill(none, side)
    width = widths.gather(1, first).masked_fill(none, side)
    top = (places[:, :1] * (side - height + 1)).floor()
    left = (places[:, 1:] * (side - width + 1)).floor()
    return torch.stack([top, left, height, width])


def cropped(images: Tensor, boxes: Tensor) -> Tensor:
    """The ``boxes`` (4, B, 1) of ``images`` (B, 3, S, S), enlarged bilinearly to their size."""
    side = images.shape[3]
    top, left, height, width = boxes
    steps = torch.arange(side, device=images.device) + 0.5
    down = top + (steps * height / side - 0.5).clamp(min=0).minimum(height - 1)  # (B, S), rows of the whole image
    across = left + (steps * width / side - 0.5).clamp(min=0).minimum(width - 1)
    x = ((2 * across + 1) / side - 1)[:, None, :].expand(-1, side, -1)
    y = ((2 * down + 1) / side - 1)[:, :, None].expand(-1, -1, side)
    return grid_sample(images, torch.stack([x, y], 3), "bilinear", "border", align_corners=False)


def recoloured(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """``ColorJitter``: brightness, contrast, saturation and hue are changed, for each image in an order of its own.

    Args:
        images: (B, 3, S, S).
        factors: (B, 4), of the first three, and the shift of the hue.
        order: int64 (B, 4), the changes in their order, by number.
    """
    for place in range(CHANGES):
        now = order[:, place]
        factor = factors.gather(1, now[:, None])[:, :, None, None]
        shades = grey(images)
        mean = shades.mean((2, 3), keepdim=True)
        other = _where(now == 2, shades, torch.where(now[:, None, None, None] == 1, mean, 0))
        blended = (factor * images + (1 - factor) * other).clamp(0, 1)
        images = _where(now == 3, shifted_hue(images, factor), blended)
    return images


def grey(images: Tensor) -> Tensor:
    """(B, 3, S, S) -> (B, 1, S, S)."""
    red, green, blue = images.split(1, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def shifted_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift``, (B, 1, 1, 1), of the circle: (B, 3, S, S)."""
    red, green, blue = images.split(1, 1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    width = torch.where(chroma == 0, 1, chroma)
    sector = torch.where(value == green, 2 + (blue - red) / width, 4 + (red - green) / width)
    sector = torch.where(value == red, (green - blue) / width, sector)  # of six
    turned = sector + 6 * shift
    channels = []
    for corner in (5, 3, 1):
        distance = torch.remainder(corner + turned, 6)
        channels.append(value - chroma * distance.minimum(4 - distance).clamp(0, 1))
    return torch.cat(channels, 1)
