"""PILOT's data sets: their transforms are torchvision's, and a missing folder is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from support.pilot_files import files
from torchvision import transforms

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.augmentation import crops
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.images.pilot import FOLDERS
from pycil_wsc.errors import UserError
from pycil_wsc.runs.class_incremental import as_configured

CPU = torch.device("cpu")
VIT = {"model_name": "finetune", "convnet_type": "timm:vit_base_patch16_224"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CIFAR-100 with two smooth images of each class, and one image of each class of VTAB."""
    root = tmp_path_factory.mktemp("data")
    targets = np.repeat(np.arange(100), 2)
    coarse = np.random.default_rng(0).integers(0, 256, (200, 4, 4, 3), np.uint8)
    images = np.stack([np.asarray(Image.fromarray(each).resize((32, 32), Image.Resampling.BICUBIC)) for each in coarse])
    np.savez(root / "cifar100.npz", train_x=images, train_y=targets, test_x=images, test_y=targets)
    wide = Image.fromarray(coarse[0]).resize((90, 60), Image.Resampling.BICUBIC)
    for part in ("train", "test"):
        for number in range(50):
            folder = root / "vtab-cil/vtab" / part / str(number)
            folder.mkdir(parents=True)
            wide.save(folder / "a.png")
    return root


def dataset_of(root, **keys):
    config = resolve(VIT | {"data_root": str(root)} | keys)
    return as_configured(load_dataset(config.dataset, root), config)


def seen_in_a_test(dataset, number):
    """The first images as the network sees them in a test: float32 (number, 3, 224, 224)."""
    source = open_source(dataset.info, dataset.test, CPU, 0)
    images, _ = next(iter(source.batches(np.arange(number), dataset.test.targets, number)))
    return images


@pytest.mark.parametrize("name", ["cifar224", "vtab"])
def test_test_images_are_resized_to_256_bicubically_cropped_and_in_0_to_1(name, root):
    dataset = dataset_of(root, dataset=name)
    found = seen_in_a_test(dataset, 3)
    bicubic = transforms.InterpolationMode.BICUBIC
    stock = transforms.Compose([transforms.Resize(256, bicubic), transforms.CenterCrop(224), transforms.ToTensor()])
    for number, image in enumerate(found):
        stored = dataset.test.images[number]
        picture = Image.fromarray(stored) if dataset.test.in_memory else Image.open(stored)
        assert (image - stock(picture)).abs().max() <= 1.01 / 255


def test_codas_images_of_cifar_are_resized_to_224_bilinearly_without_a_crop(root):
    dataset = dataset_of(root, dataset="cifar224", crop_pct=1.0, test_interpolation="bilinear", crop_scale=0.08)
    stock = transforms.Compose([transforms.Resize(224), transforms.ToTensor()])
    for number, image in enumerate(seen_in_a_test(dataset, 3)):
        assert (image - stock(Image.fromarray(dataset.test.images[number]))).abs().max() <= 1.01 / 255


def test_crops_of_enlarged_arrays_are_torchvisions_for_the_same_boxes(root):
    dataset = dataset_of(root, dataset="cifar224", flip=False)
    indices = np.arange(6)
    source = open_source(dataset.info, dataset.train, CPU, 0)
    batches = source.batches(indices, dataset.train.targets, 6, train=True, seed=5, shuffle=False)
    boxes = crops.random_boxes(np.full((6, 2), 32), np.random.default_rng([5, 1]), 0.05)
    for image, stored, box in zip(next(iter(batches))[0], dataset.train.images[:6], boxes.tolist(), strict=True):
        expected = transforms.functional.resized_crop(Image.fromarray(stored), *box, [224, 224])
        assert (image - transforms.functional.to_tensor(expected)).abs().max() <= 1.01 / 255


def test_crops_have_at_least_a_twentieth_of_the_image():
    sizes = np.full((20_000, 2), 500)
    areas = crops.random_boxes(sizes, np.random.default_rng(0), 0.05)[:, 2:].prod(1) / 500**2
    assert 0.045 < areas.min() < 0.06


def test_pixels_are_normalised_only_if_asked_for(root):
    assert dataset_of(root, dataset="cifar224").info.std == (1, 1, 1)
    half = [0.5, 0.5, 0.5]
    assert dataset_of(root, dataset="cifar224", mean=half, std=half).info.std == (0.5, 0.5, 0.5)
    assert dataset_of(root, dataset="cifar100").info.std == (0.5, 0.5, 0.5)


def test_the_size_is_224_whatever_the_models_is_unless_it_is_given(root):
    large = {"dataset": "cifar224", "convnet_type": "timm:vit_base_patch16_384"}
    assert dataset_of(root, **large).info.image_size == 224
    assert dataset_of(root, **large, image_size=96).info.image_size == 96


@pytest.mark.parametrize("name", FOLDERS)
def test_a_missing_folder_is_named_with_what_belongs_there(name, tmp_path):
    place, _ = FOLDERS[name]
    with pytest.raises(UserError) as caught:
        load_dataset(name, tmp_path)
    line = str(caught.value)
    assert line.startswith(f"dataset '{name}': the folder {tmp_path / place} does not exist; unpack")
    assert f"{place}/train and {place}/test" in line
    assert "\n" not in line


def test_a_folder_with_other_classes_is_refused(root, tmp_path):
    for part in ("train", "test"):
        (tmp_path / "cub" / part / "one").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "cub" / part / "one" / "a.png")
    with pytest.raises(UserError, match="has 1 classes, PILOT's has 200; use 'folder:"):
        load_dataset("cub", tmp_path)


def test_a_crop_key_that_has_no_effect_is_refused(root):
    with pytest.raises(UserError, match="crop_pct: has no effect on arrays, which get padded crops"):
        dataset_of(root, dataset="cifar100", crop_pct=1.0)
    with pytest.raises(
        UserError, match="padding: has no effect on this data set's images, which get random resized crops"
    ):
        dataset_of(root, dataset="cifar224", padding=4)


def test_classes_are_shuffled_by_the_seed_as_in_pilot(root):
    from pycil_wsc.data.tasks.tasks import tasks_of

    keys = {"dataset": "cifar224", "init_cls": 10, "increment": 10, "seed": files()["ranpac"]["seed"][0]}
    dataset = dataset_of(root, **keys)
    manager = tasks_of(dataset, resolve(VIT | keys))
    np.random.seed(1993)
    assert list(manager.class_order) == np.random.permutation(100).tolist()
    assert len(manager.tasks) == 10
    assert replace(dataset.info).classes[:2] == ("0", "1")
