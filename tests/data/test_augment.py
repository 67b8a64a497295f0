"""Augmentation equals torchvision's transforms of PIL images, pixel by pixel, on the same random choices."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.batches.augmentation.augment import Normalise


def images(count=64, side=32):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8))


@pytest.mark.parametrize("side, padding", [(32, 4), (8, 1), (8, 0)])
def test_crop_and_flip_are_torchvisions(side, padding):
    batch, rng = images(side=side), np.random.default_rng(1)
    top, left = (torch.from_numpy(rng.integers(0, 2 * padding + 1, len(batch))) for _ in range(2))
    mirror = torch.from_numpy(rng.random(len(batch)) < 0.5)
    ours = augment.crop_flip(batch, padding, top, left, mirror)
    for i, image in enumerate(batch):
        expected = F.crop(F.pad(Image.fromarray(image.numpy()), padding), int(top[i]), int(left[i]), side, side)
        expected = F.hflip(expected) if mirror[i] else expected
        assert np.array_equal(ours[i].numpy(), np.array(expected))


def test_brightness_is_pils_eight_bit_blend():
    factors = torch.from_numpy(np.random.default_rng(2).uniform(0.75294, 1.24706, 64).astype(np.float32))
    factors[:3] = torch.tensor([0.0, 1.0, 2.0])
    ours = augment.brightness(images(), factors)
    for image, factor, result in zip(images(), factors, ours):
        assert np.array_equal(
            result.numpy(), np.array(F.adjust_brightness(Image.fromarray(image.numpy()), float(factor)))
        )


def test_normalisation_is_torchvisions_and_channels_last():
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    ours = Normalise(mean, std, "cpu")(images())
    expected = torch.stack([F.normalize(F.to_tensor(Image.fromarray(image.numpy())), mean, std) for image in images()])
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    assert ours.dtype == torch.float32 and ours.is_contiguous(memory_format=torch.channels_last)


def test_random_choices_cover_every_offset_evenly_and_follow_the_generator():
    """A single lit pixel in the middle shows where each crop was taken and whether it was mirrored."""
    batch = torch.zeros(20_000, 9, 9, 3, dtype=torch.uint8)
    batch[:, 4, 3] = 255
    result = augment.random_crop_flip(batch, 2, True, torch.Generator().manual_seed(0))
    rows, columns = result[..., 0].amax(2).argmax(1), result[..., 0].amax(1).argmax(1)
    row_counts = torch.bincount(rows, minlength=9)[2:7]
    assert row_counts.sum() == len(batch) and (row_counts / len(batch) - 1 / 5).abs().max() < 0.015
    unmirrored, mirrored = {1, 2, 3, 4, 5}, {3, 4, 5, 6, 7}  # the pixel is off the centre by one
    counts = torch.bincount(columns, minlength=9) / len(batch)
    expected = torch.tensor([sum(c in where for where in (unmirrored, mirrored)) / 10 for c in range(9)])
    assert (counts - expected).abs().max() < 0.015
    again = augment.random_crop_flip(batch, 2, True, torch.Generator().manual_seed(0))
    other = augment.random_crop_flip(batch, 2, True, torch.Generator().manual_seed(1))
    assert torch.equal(result, again) and not torch.equal(result, other)


def test_brightness_factors_are_uniform_about_one():
    grey = torch.full((20_000, 1, 1, 3), 100, dtype=torch.uint8)
    levels = augment.random_brightness(grey, 63 / 255, torch.Generator().manual_seed(0))[:, 0, 0, 0].float()
    assert levels.min() == 75 and levels.max() == 124  # 100 times 0.75294 and 1.24706, truncated
    assert abs(levels.mean() - 99.5) < 0.5 and abs(levels.var() - 49.4**2 / 12) < 6


def test_without_flip_nothing_is_mirrored():
    batch = images(side=8)
    assert torch.equal(augment.random_crop_flip(batch, 0, False, torch.Generator().manual_seed(0)), batch)
