"""Images are computed in full precision, even where batches are drawn while the network's autocast is on."""

import numpy as np
import pytest
import torch

from pycil_wsc.data.crops import random_resized_crop
from pycil_wsc.data.rand_augment import rand_augment


@pytest.mark.parametrize(
    "augmented",
    [
        lambda images: rand_augment(images, np.random.default_rng(1)),
        lambda images: random_resized_crop(images, 20, "bilinear", np.random.default_rng(1)),
        lambda images: random_resized_crop(images, 20, "bicubic", np.random.default_rng(1)),
    ],
)
def test_autocast_changes_no_pixel(augmented):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8))
    plain = augmented(images.clone())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augmented(images.clone()), plain)
