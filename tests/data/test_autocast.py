"""Images are computed in full precision, even where batches are drawn while the network's autocast is on."""

import numpy as np
import pytest
import torch

from pycil_wsc.data.batches.augmentation.crops import Crops, random_boxes
from pycil_wsc.data.batches.augmentation.rand_augment import RandAugment

CPU = torch.device("cpu")
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8))


def operations():
    return RandAugment([(64, slice(None))], 1, CPU).applied(IMAGES, 0)


def crops(interpolation):
    boxes = random_boxes(np.full((64, 2), 32), np.random.default_rng(1))
    places = Crops(1024 * np.arange(64), np.full(64, 32), boxes, CPU)
    return places.of(IMAGES.view(-1, 3), slice(None), slice(None), 20, interpolation)


@pytest.mark.parametrize("augmented", [operations, lambda: crops("bilinear"), lambda: crops("bicubic")])
def test_autocast_changes_no_pixel(augmented):
    plain = augmented()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augmented(), plain)
