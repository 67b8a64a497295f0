"""IL2A's mixtures of images."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pycil_wsc.data.batches.epoch_order import batch_slices
from pycil_wsc.methods.prototypes.il2a import MixingSource

KEYS = {"init_cls": 4, "increment": 3, "batch_size": 32, "lrate": 1e-3, "init_lr": 1e-3}


def test_every_image_is_mixed_with_others_of_its_batch_and_each_pair_is_a_class():
    targets = np.array([5, 5, 3, 4, 6, 1, 4, 3])
    source = MixingSource(None, old=3, seen=7, rounds=50, alpha=20.0, low=0.4)
    first, second, classes, weights = source.pairs(targets, np.random.default_rng(0))
    number = {pair: 7 + place for place, pair in enumerate([(4, 3), (5, 3), (5, 4), (6, 3), (6, 4), (6, 5)])}
    for a, b, label in zip(targets[first], targets[second], classes):
        assert label == number[max(a, b), min(a, b)]
    assert set(classes) == set(number.values()) and 1 not in targets[first] and 1 not in targets[second]
    assert ((weights >= 0.4) & (weights <= 0.6)).all() and 0 < (weights == 0.5).mean() < 0.5
    assert weights.std() == pytest.approx(0.047, abs=0.01)
    none = replace(source, rounds=0).pairs(targets, np.random.default_rng(0))
    assert [len(each) for each in none] == [0, 0, 0, 0]


def test_a_mixture_is_the_weighted_mean_of_its_two_images():
    pixels, targets = torch.randn(10, 3, 2, 2), np.array([3, 4, 5, 6, 3, 4, 5, 6, 3, 4])

    class Whole:
        device = torch.device("cpu")

        def batches(self, indices, labels, size, **options):
            for part in batch_slices(len(indices), size, True):
                yield pixels[indices[part]], torch.from_numpy(labels[indices[part]])

    source = MixingSource(Whole(), old=3, seen=7, rounds=4, alpha=20.0, low=0.4)
    indices, rng = np.arange(10)[::-1].copy(), np.random.default_rng([5, 3])
    found = source.batches(indices, targets, 4, train=True, seed=5, shuffle=False)
    for part, (images, _, mixed, classes) in zip(batch_slices(10, 4, True), found, strict=True):
        first, second, numbers_, weights = source.pairs(targets[indices[part]], rng)
        assert torch.equal(images, pixels[indices[part]]) and classes.tolist() == numbers_.tolist()
        for image, one, other, weight in zip(mixed, first, second, weights, strict=True):
            torch.testing.assert_close(image, weight * images[one] + (1 - weight) * images[other])
        assert len(mixed) > 4 and len(set(weights.tolist())) > 2
