"""AutoAugment's policies in batches, against PIL's operations on single images."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from pycil_wsc.data.batches.augmentation import auto_augment
from pycil_wsc.data.batches.augmentation.auto_augment import (
    OPERATIONS,
    RANGES,
    AutoAugment,
    cutout,
    drawn,
    policies,
    value_of,
)

SIDE = 32
ENHANCED = {name: getattr(ImageEnhance, name) for name in ("Brightness", "Color", "Contrast", "Sharpness")}
MATRICES = {  # of x and y in the original: (a, b, c, d, e, f) for a x + b y + c and d x + e y + f
    "ShearX": lambda value: (1, value, 0, 0, 1, 0),
    "ShearY": lambda value: (1, 0, 0, value, 1, 0),
    "TranslateX": lambda value: (1, 0, value * SIDE, 0, 1, 0),
    "TranslateY": lambda value: (1, 0, 0, 0, 1, value * SIDE),
}


@pytest.fixture
def images():
    """Noise in the whole range and in parts of it, which differ from channel to channel: uint8 (8, side, side, 3)."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (8, SIDE, SIDE, 3))
    low, high = np.sort(rng.integers(0, 256, (2, 8, 1, 1, 3)), axis=0)
    return np.where(np.arange(8)[:, None, None, None] < 4, noise, np.clip(noise, low, high)).astype(np.uint8)


def by_pil(image, name, value):
    if name in ENHANCED:
        return ENHANCED[name](image).enhance(1 + value)
    if name == "Rotate":
        turned = image.convert("RGBA").rotate(value)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert("RGB")
    if name in MATRICES:
        how = Image.Resampling.BICUBIC if name.startswith("Shear") else Image.Resampling.NEAREST
        return image.transform(image.size, Image.Transform.AFFINE, MATRICES[name](value), how, fillcolor=(128,) * 3)
    if name == "Posterize":
        return ImageOps.posterize(image, round(abs(value)))
    if name == "Solarize":
        return ImageOps.solarize(image, abs(value))
    return getattr(ImageOps, name.lower())(image)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("sign", [1, -1])
def test_an_operation_is_pils_to_the_bit_at_all_magnitudes(name, sign, images):
    maps = torch.from_numpy(images).permute(0, 3, 1, 2)
    for magnitude in range(10) if name in RANGES else [None]:
        value = sign * value_of(name, magnitude)
        ours = OPERATIONS[name](maps, value).permute(0, 2, 3, 1).numpy()
        theirs = np.stack([np.asarray(by_pil(Image.fromarray(image), name, value)) for image in images])
        np.testing.assert_array_equal(ours, theirs, f"magnitude {magnitude}")


def test_contrast_is_stretched_as_pil_does_for_all_least_and_largest_values():
    """Each channel has all values between them; PIL's double precision leaves some integers one level lower."""
    rows, low, high = np.arange(256), *np.triu_indices(256)
    pairs = np.random.default_rng(0).permutation(len(low))[:900].reshape(-1, 3)
    low, high = low[pairs][..., None], high[pairs][..., None]
    pictures = np.clip(rows, low, high).reshape(-1, 3, 16, 16).transpose(0, 2, 3, 1).astype(np.uint8)
    ours = OPERATIONS["AutoContrast"](torch.from_numpy(pictures).permute(0, 3, 1, 2), 0).permute(0, 2, 3, 1)
    theirs = [np.asarray(ImageOps.autocontrast(Image.fromarray(picture))) for picture in pictures]
    np.testing.assert_array_equal(ours, np.stack(theirs))


def test_every_image_draws_one_policy_and_each_operation_by_its_probability():
    counts, number = {}, 20_000
    for name, value, members in drawn(np.random.default_rng(0), number, slice(None)):
        counts[name, round(abs(value), 6)] = counts.get((name, round(abs(value), 6)), 0) + len(members)
    expected = {}
    for policy in policies():
        for name, probability, magnitude in policy:
            key = name, round(value_of(name, magnitude), 6)
            expected[key] = expected.get(key, 0) + probability / len(policies())
    assert {key for key, share in expected.items() if share} == counts.keys()
    for key, count in counts.items():
        assert count / number == pytest.approx(expected[key], abs=0.01), key


def test_the_square_is_half_as_wide_as_the_image_and_cut_off_at_its_edges():
    images = torch.full((3, 32, 32, 3), 200, dtype=torch.uint8)
    cut = cutout(images, torch.tensor([[16, 16], [0, 31], [8, 5]]))
    for image, (rows, columns) in zip(cut, [((8, 24), (8, 24)), ((0, 8), (23, 32)), ((0, 16), (0, 13))]):
        expected = torch.full((32, 32, 3), 200, dtype=torch.uint8)
        expected[slice(*rows), slice(*columns)] = 0
        assert torch.equal(image, expected)


def test_the_choices_depend_on_the_seed_alone_and_not_on_how_batches_are_shared(images):
    batch = torch.from_numpy(images[:1]).expand(40, -1, -1, -1)
    cpu = torch.device("cpu")
    whole = [AutoAugment([(40, slice(None))] * 2, 3, cpu).applied(batch, number) for number in (0, 1)]
    assert not torch.equal(*whole) and torch.equal(batch[0], torch.from_numpy(images[0]))
    assert not torch.equal(AutoAugment([(40, slice(None))], 4, cpu).applied(batch, 0), whole[0])
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        part = AutoAugment([(40, rows)] * 2, 3, cpu)
        for number, expected in enumerate(whole):
            assert torch.equal(part.applied(batch[rows], number), expected[rows])


def test_gaps_are_grey():
    black = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    moved = OPERATIONS["TranslateX"](black, 0.5)
    assert (moved[..., :4] == 0).all() and (moved[..., 4:] == auto_augment.GREY).all()
