"""timm's augmentation in batches, against timm's own operations on PIL images."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.augmentation.rand_augment import OPERATIONS, RandAugment
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run


@pytest.fixture
def images():
    """Smooth uint8 images (2, 24, 24, 3): interpolation differs little between libraries."""
    noise = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(noise, (24, 24), mode="bicubic").clamp(0.02, 0.98)
    return (255 * smooth).to(torch.uint8).permute(0, 2, 3, 1)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("level", [0.9, -0.9, 0.4])
def test_an_operation_is_timms(name, level, images, monkeypatch):
    """At the same magnitude and sign. Both round, and a few pixels at a border differ."""
    auto_augment = pytest.importorskip("timm.data.auto_augment")
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: value if level > 0 else -value)
    hparams = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BILINEAR}
    operation = auto_augment.AugmentOp(name, prob=1.0, magnitude=10 * abs(level), hparams=hparams)
    ours = OPERATIONS[name](images.permute(0, 3, 1, 2), level).permute(0, 2, 3, 1)
    for image, changed in zip(images.numpy(), ours.numpy()):
        theirs = np.asarray(operation(Image.fromarray(image)), int)
        differences = np.abs(changed.astype(int) - theirs)
        assert np.median(differences) <= 2 and (differences > 12).mean() < 0.15


@pytest.mark.parametrize("name", ["Brightness", "Color", "Contrast", "Sharpness"])
@pytest.mark.parametrize("level", [0.9, -0.9, 0.4, -0.13])
def test_an_enhancement_is_pils_to_the_bit(name, level):
    noise = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = OPERATIONS[f"{name}Increasing"](noise, level).permute(0, 2, 3, 1).numpy()
    for image, changed in zip(noise.permute(0, 2, 3, 1).numpy(), ours):
        theirs = getattr(ImageEnhance, name)(Image.fromarray(image)).enhance(max(0.1, 1 + 0.9 * level))
        np.testing.assert_array_equal(changed, theirs)


def augmented(batch, seed, number=64, rows=slice(None)):
    """The first batch, of ``number`` images, whose ``rows`` are in ``batch``."""
    return RandAugment([(number, rows)], seed, torch.device("cpu")).applied(batch, 0)


def test_each_image_has_its_own_choices_and_a_seed_gives_them_again(images):
    batch = images[:1].expand(64, -1, -1, -1)
    first, again, other = (augmented(batch, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    kinds = {image.numpy().tobytes() for image in first}
    assert 20 < len(kinds) and torch.equal(batch, images[:1].expand(64, -1, -1, -1))
    unchanged = sum(torch.equal(image, images[0]) for image in first) / 64
    assert 0.1 < unchanged < 0.45, "a quarter draws no operation"


def test_the_rows_of_a_batch_are_what_the_whole_batch_has(images):
    batch = images.repeat(8, 1, 1, 1)
    whole = augmented(batch, 3, 16)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert torch.equal(augmented(batch[rows], 3, 16, rows), whole[rows])


def test_training_images_are_augmented_and_test_images_are_not(settings):
    config = resolve(settings | {"augmentation": "timm", "image_size": 16, "model_name": "replay", "max_tasks": 1})
    run = Run(config, Datasets().of(config), lambda progress: None)
    targets, some = run.manager.train_targets, np.arange(6)
    batches = [
        next(iter(run.train_source.batches(some, targets, 6, train=train, seed=seed, shuffle=False)))[0]
        for train, seed in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2))
    ]
    assert all(images.shape == (6, 3, 16, 16) for images in batches)
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    assert torch.equal(batches[3], batches[4])
    assert len(run.execute()["curve"]) == 1


def test_what_timms_augmentation_does_not_have_is_one_line():
    with pytest.raises(UserError, match="padding: has no effect with 'augmentation' .timm.; leave the key out"):
        resolve({"augmentation": "timm", "padding": 2})
