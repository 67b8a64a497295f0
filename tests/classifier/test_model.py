"""`learner.model` and `learner.transform`: the network of a learner by itself, and what is done to an image before."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from support.months import photos
from support.small_learners import FILES, QUICK, arrays, learned, months
from torch import nn
from torchvision.transforms.v2 import functional

from pycil_wsc import registry
from pycil_wsc.classifier.predict.images import Transform
from pycil_wsc.data.images.image_files import IMAGENET
from pycil_wsc.data.images.npz import info_of_arrays
from pycil_wsc.errors import UserError

__all__ = ["months"]

pytestmark = pytest.mark.usefixtures("undrawn")


def test_the_model_of_a_task_stays_as_it_was_and_is_the_network_alone(months):
    learner = learned(months[0], name="lwf", **QUICK)
    images = torch.stack([learner.transform(image) for image in arrays(months[0])[0]])
    model, before = learner.model, learner.model(images)
    learner.learn(months[1])
    assert torch.equal(model(images), before) and before.shape[1] == 2 < learner.model(images).shape[1]
    assert {name.split(".")[0] for name in learner.model.state_dict()} == {"network"}
    assert not [name for name in learner.model.state_dict() if "old" in name or "teacher" in name]


def test_a_method_that_predicts_in_its_own_way_does_so_in_its_model(months, monkeypatch):
    """Here, by logits that are not those of the head."""

    class Turned(registry.learners["replay"]):
        def classify(self, features):
            return -super().classify(features)

    monkeypatch.setitem(registry.learners, "replay", Turned)
    learner = learned(months[0], name="replay", **QUICK)
    images = arrays(months[0], "test")[0]
    logits = learner.model(torch.stack([learner.transform(image) for image in images]))
    torch.testing.assert_close(logits, learner.answers.classifier.logits(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ranpac", "slda", "ds-al"])
def test_the_sums_over_the_images_are_not_in_the_model_but_the_learner_goes_on(name, months):
    learner = learned(months[0], name=name, **QUICK)
    sums = {key for key in learner._state["learner"] if key.endswith((".gram", ".products"))}
    assert sums and not [key for key in learner.model.state_dict() if key.endswith((".gram", ".products"))]
    learner.learn(months[1])
    assert "bee" in learner.classes


# ---- the transform ---------------------------------------------------------------------------------------------------


def of_arrays(side=8, image_size=None):
    info = info_of_arrays("data", ("a",), np.random.default_rng(0).integers(0, 256, (4, side, side, 3), np.uint8))
    return replace(info, image_size=image_size or side, stored_size=side)


def normalised(pixels, mean, std):
    """uint8 (H, W, 3) -> float64 (3, H, W), by the definition."""
    return ((pixels / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)


def test_files_are_resized_cropped_at_the_centre_and_normalised(tmp_path):
    """As torchvision's functions do on PIL images, for files, PIL images, arrays and tensors alike."""
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES)
    pixels = np.random.default_rng(0).integers(0, 256, (31, 45, 3), dtype=np.uint8)
    picture, file = Image.fromarray(pixels), tmp_path / "image.png"
    picture.save(file)
    cropped = functional.center_crop(functional.resize(picture, [18], antialias=True), [16])  # 16 * 256 / 224
    expected = normalised(np.asarray(cropped), **IMAGENET)
    tensor = torch.from_numpy(pixels)
    forms = [file, str(file), picture, picture.convert("RGBA"), pixels, tensor, tensor.permute(2, 0, 1)]
    for form in forms:
        found = learner.transform(form)
        assert found.dtype == torch.float32 and found.shape == (3, 16, 16)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_arrays_of_the_size_of_training_are_only_normalised_and_others_are_fitted_to_it():
    info, pixels = of_arrays(), np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    np.testing.assert_allclose(Transform(info)(pixels), normalised(pixels, info.mean, info.std), atol=1e-5)
    wide = Image.fromarray(np.random.default_rng(2).integers(0, 256, (20, 30, 3), np.uint8))
    fitted = functional.center_crop(functional.resize(wide, [8], antialias=True), [8])
    np.testing.assert_allclose(Transform(info)(wide), normalised(np.asarray(fitted), info.mean, info.std), atol=1e-5)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (3, 151)])
def test_of_a_very_long_image_the_middle_is_resized(size, monkeypatch):
    """A file of 85 bytes would take a gigabyte. The pixels are those of the image resized whole."""
    info = replace(of_arrays(), crop="resized", image_size=16, stored_size=None)
    long = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    found = Transform(info).fitted(long)
    monkeypatch.setattr("pycil_wsc.data.images.image_files.LONGEST", 10_000)
    np.testing.assert_allclose(found.astype(int), Transform(info).fitted(long), atol=1)


def test_a_very_long_image_is_not_resized_whole(monkeypatch):
    seen = []
    transform = Transform(replace(of_arrays(), crop="resized", image_size=16, stored_size=None))
    fit = transform._fit
    monkeypatch.setattr(transform, "_fit", lambda image: seen.append(image.size) or fit(image))
    for size in ((1, 4000), (30, 20)):
        transform.fitted(Image.new("RGB", size))
    assert seen == [(1, 50), (30, 20)]


def test_greyscale_is_three_equal_channels():
    info, grey = of_arrays(), np.random.default_rng(1).integers(0, 256, (8, 8), np.uint8)
    expected = Transform(info)(np.stack([grey] * 3, -1))
    for form in (grey, grey[..., None], torch.from_numpy(grey), Image.fromarray(grey)):
        assert torch.equal(Transform(info)(form), expected)


def test_a_transform_says_what_it_does():
    text = "Transform(resize=8, crop=8, side=16, interpolation=bilinear, mean="
    assert repr(Transform(of_arrays(8, 16))).startswith(text)


REFUSED = {
    "image: is a list; give a PIL image, a file name": [[1]],
    "image: float32 of shape (8, 8, 3); give a PIL image": np.zeros((8, 8, 3), np.float32),
    "image: uint8 of shape (2, 8, 8, 3); give": np.zeros((2, 8, 8, 3), np.uint8),
    "image: uint8 of shape (8, 0, 3); give": np.zeros((8, 0, 3), np.uint8),
    "image: more than 8 bits per channel (mode F)": Image.new("F", (8, 8)),
    "nowhere.png: No such file or directory": "nowhere.png",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_no_image_is_one_line(line):
    with pytest.raises(UserError) as error:
        Transform(of_arrays())(REFUSED[line])
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_learner_that_has_learned_nothing_has_no_model():
    learner = learned()
    for name in ("model", "transform"):
        with pytest.raises(UserError, match="nothing has been learned yet; call learn first"):
            getattr(learner, name)
    assert not isinstance(learner, nn.Module)
