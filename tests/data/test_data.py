"""Data sets are read exactly as stored, and every defect is reported in one line that names the file."""

import dataclasses
import io
import logging
import math
import os
import re
import shutil
import urllib.error
import zipfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimeoutError
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from support.small_runs import Command
from torchvision.datasets import ImageFolder

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images import fingerprint as fingerprints
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split, load_dataset, sized
from pycil_wsc.data.images.fingerprint import changed
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.images.npz import mean_and_std
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import Unwritable, UserError
from pycil_wsc.files import locked
from pycil_wsc.launch.attempt import Datasets


def small_arrays(classes=3, side=8, train=4, test=2, seed=0):
    """``train`` and ``test`` random images of each class, in shuffled order."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        arrays[f"{part}_x"] = rng.integers(0, 256, (classes * count, side, side, 3), dtype=np.uint8)
        arrays[f"{part}_y"] = rng.permutation(np.repeat(np.arange(classes), count))
    return arrays


def write_npz(path, **changes):
    """``small_arrays`` with some replaced; None removes one."""
    arrays = small_arrays() | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def write_folder(root, files):
    """Small images at the given relative paths."""
    rng = np.random.default_rng(0)
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(
            path, {".jpg": "JPEG", ".jpeg": "JPEG"}.get(path.suffix.lower(), "PNG")
        )
    return root


def complaint(name, root="."):
    """The one-line error message for the data set."""
    with pytest.raises(UserError) as caught:
        load_dataset(name, root)
    return one_line(caught.value)


def one_line(error):
    message = str(error)
    assert message and "\n" not in message and ";" in message, "one line, with a remedy"
    return message


def test_npz_holds_the_users_arrays(tmp_path):
    arrays = small_arrays(classes=4, side=16)
    name = f"npz:{write_npz(tmp_path / 'own.npz', **arrays)}"
    dataset = load_dataset(name, "/nowhere")
    for part in ("train", "test"):
        split = getattr(dataset, part)
        assert split.in_memory and len(split) == len(arrays[f"{part}_y"])
        assert np.array_equal(split.images, arrays[f"{part}_x"]) and split.images.dtype == np.uint8
        assert np.array_equal(split.targets, arrays[f"{part}_y"]) and split.targets.dtype == np.int64
    info = dataset.info
    assert (info.name, info.classes, info.num_classes, info.image_size) == (name, ("0", "1", "2", "3"), 4, 16)
    assert (info.crop, info.padding, info.flip, info.brightness) == ("pad", 2, True, 0)


def test_records_are_frozen(tmp_path):
    dataset = load_dataset(f"npz:{write_npz(tmp_path / 'own.npz')}", ".")
    for record, field in ((dataset, "info"), (dataset.info, "mean"), (dataset.train, "targets")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_npz_takes_class_names_compression_and_any_integer_labels(tmp_path):
    arrays = small_arrays()
    arrays |= {"train_y": arrays["train_y"].astype(np.uint8), "test_y": arrays["test_y"].astype(">i4")}
    np.savez_compressed(tmp_path / "own.npz", **arrays, classes=np.array(["ant", "bee", "cat"]))
    dataset = load_dataset(f"npz:{tmp_path / 'own.npz'}", ".")
    assert dataset.info.classes == ("ant", "bee", "cat")
    assert dataset.train.targets.dtype == dataset.test.targets.dtype == np.int64
    assert np.array_equal(dataset.test.targets, arrays["test_y"])


OVERWRITTEN = """
import sys
from pycil_wsc.data.images.datasets import load_dataset
path = sys.argv[1]
images = load_dataset(f"npz:{path}", ".").train.images
before = images.sum()
open(path, "wb").close()  # as np.savez begins
assert images.sum() == before
print("alive")
"""


def test_a_file_that_is_overwritten_changes_nothing_that_was_read(tmp_path):
    """In a process of its own, which a mapped file would end with SIGBUS."""
    path, script = write_npz(tmp_path / "own.npz", **small_arrays(side=64)), tmp_path / "script.py"
    script.write_text(OVERWRITTEN)
    process = Command([path], script)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "alive\n"), errors


def test_grey_images_get_three_equal_channels(tmp_path):
    arrays = small_arrays()
    grey = {name: arrays[name][..., 0] for name in ("train_x", "test_x")}
    dataset = load_dataset(f"npz:{write_npz(tmp_path / 'grey.npz', **grey)}", ".")
    for channel in range(3):
        assert np.array_equal(dataset.train.images[..., channel], grey["train_x"])
        assert np.array_equal(dataset.test.images[..., channel], grey["test_x"])


def test_relative_paths_start_at_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path / "own.npz")
    write_folder(tmp_path / "own", ["train/a/0.png", "val/a/0.png"])
    assert len(load_dataset("npz:own.npz", "/nowhere").train) == 12
    assert len(load_dataset("folder:own", "/nowhere").train) == 1
    assert str(tmp_path) in complaint("npz:elsewhere.npz")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_npz(tmp_path / "own.npz")
    image_folder(tmp_path / "imagenet100")
    assert len(load_dataset("npz:~/own.npz", ".").train) == 12
    assert len(load_dataset("folder:~/imagenet100", ".").test) == len(load_dataset("imagenet100", "~").test) == 4


def test_mean_and_std_are_those_of_the_training_images(tmp_path):
    arrays = small_arrays(train=40)
    arrays["train_x"] //= np.array([1, 2, 3], dtype=np.uint8)
    info = load_dataset(f"npz:{write_npz(tmp_path / 'own.npz', **arrays)}", ".").info
    scaled = arrays["train_x"].astype(np.float64) / 255
    assert np.allclose(info.mean, scaled.mean((0, 1, 2)), rtol=1e-12, atol=0) and np.allclose(
        info.std, scaled.std((0, 1, 2)), rtol=1e-12, atol=0
    )
    assert info.mean[0] > info.mean[1] > info.mean[2]
    for chunk in (1, 64, 1000, 7777):
        assert mean_and_std(arrays["train_x"], chunk) == (info.mean, info.std)


@pytest.mark.parametrize("value", [0, 1, 77, 128, 255])
def test_a_channel_of_one_value_is_not_divided_by_zero(value, tmp_path):
    images = small_arrays()["train_x"]
    images[..., 1] = value
    info = load_dataset(f"npz:{write_npz(tmp_path / 'own.npz', train_x=images)}", ".").info
    assert info.std[1] == 1 and np.isclose(info.mean[1], value / 255) and 0 < info.std[0] < 1


def cut_short(path):
    content = write_npz(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def damaged_member(path, save=np.savez):
    """The directory of the archive is whole, the bytes of an array are not."""
    save(path, **small_arrays())
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)


UNREADABLE = {
    "absent": lambda path: None,
    "a folder": Path.mkdir,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("train_x, train_y\n"),
    "a single array": lambda path: path.write_bytes(npy(np.zeros(3))),
    "cut short": cut_short,
    "damaged": damaged_member,
    "damaged and compressed": lambda path: damaged_member(path, np.savez_compressed),
    "a negative shape": lambda path: header_with(path, b"(12, 8, 8, 3)", b"(-1,8, 8, 3)"),
    "a shape of 10^20": lambda path: header_with(path, b"(12, 8, 8, 3), }", b"(10" + b"0" * 18 + b"0, 8, 8, 3), }"),
    "bytes after the array": lambda path: rewritten(path, lambda content: content + b"more"),
    "an array cut short": lambda path: rewritten(path, lambda content: content[:-1]),
    "damaged LZMA": lambda path: rewritten(path, lambda content: content, zipfile.ZIP_LZMA, 60),
    "pickled images": lambda path: write_npz(path, train_x=np.array([{}] * 12)),
    "pickled classes": lambda path: write_npz(path, classes=np.array(["a", "b", "c"], dtype=object)),
}


def header_with(path, old, new):
    """``train_x`` with another shape in its header."""

    def change(content):
        begin = content.index(old)
        end = content.index(b"\n")
        header = content[:begin] + new + content[begin + len(old) : end]
        return header[:end].ljust(end) + content[end:]

    rewritten(path, change)


def rewritten(path, change, compression=zipfile.ZIP_STORED, zeros=0):
    """An archive whose ``train_x`` is changed, with right checksums; then ``zeros`` bytes of it are cleared."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in small_arrays().items():
            archive.writestr(f"{name}.npy", change(npy(array)) if name == "train_x" else npy(array))
    content = bytearray(path.read_bytes())
    content[200 : 200 + zeros] = bytes(zeros)
    path.write_bytes(content)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("defect", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(defect, tmp_path):
    path = tmp_path / "own.npz"
    UNREADABLE[defect](path)
    assert complaint(f"npz:{path}").startswith(
        f"{path}: {'no such file' if defect == 'absent' else 'not a complete npz file'}"
    )


GOOD = small_arrays()
DEFECTS = {  # changed arrays -> parts of the message
    "no training images": ({"train_x": None}, ["no array 'train_x'", "train_y", "test_x", "test_y"]),
    "no test labels": ({"test_y": None}, ["no array 'test_y'"]),
    "float images": ({"train_x": GOOD["train_x"] / 255}, ["'train_x'", "float64", "uint8"]),
    "signed images": ({"test_x": GOOD["test_x"].astype(np.int64)}, ["'test_x'", "int64", "uint8"]),
    "flat images": ({"train_x": GOOD["train_x"].reshape(12, -1)}, ["'train_x'", "(12, 192)"]),
    "channels first": ({"train_x": GOOD["train_x"].transpose(0, 3, 1, 2)}, ["'train_x'", "(12, 3, 8, 8)"]),
    "four channels": ({"train_x": np.zeros((12, 8, 8, 4), np.uint8)}, ["'train_x'", "(12, 8, 8, 4)"]),
    "not square": ({"test_x": GOOD["test_x"][:, 1:]}, ["'test_x'", "7x8", "square"]),
    "nothing": ({"train_x": GOOD["train_x"][:0], "train_y": GOOD["train_y"][:0]}, ["'train_x'", "(0, 8, 8, 3)"]),
    "two sizes": ({"test_x": GOOD["test_x"][:, 1:, 1:]}, ["'train_x'", "side 8", "'test_x'", "7"]),
    "too few labels": ({"train_y": GOOD["train_y"][1:]}, ["12 images", "'train_x'", "11 labels", "'train_y'"]),
    "float labels": ({"train_y": GOOD["train_y"] * 1.0}, ["'train_y'", "float64", "integers"]),
    "boolean labels": ({"train_y": GOOD["train_y"] > 1}, ["'train_y'", "bool", "integers"]),
    "one-hot labels": ({"train_y": np.eye(3, dtype=int)[GOOD["train_y"]]}, ["'train_y'", "(12, 3)"]),
    "a negative label": (
        {"test_y": np.where(GOOD["test_y"] == 1, -7, GOOD["test_y"])},
        ["'test_y'", "label -7", "0..2"],
    ),
    "labels from one": ({"train_y": GOOD["train_y"] + 1, "test_y": GOOD["test_y"] + 1}, ["'train_y'", "class '0'"]),
    "a gap": ({"train_y": GOOD["train_y"] * 2, "test_y": GOOD["test_y"] * 2}, ["'train_y'", "class '1'"]),
    "a huge label": ({"train_y": np.where(GOOD["train_y"] == 2, 2**40, GOOD["train_y"])}, ["'train_y'", "class '2'"]),
    "a class without test images": ({"test_y": np.minimum(GOOD["test_y"], 1)}, ["'test_y'", "class '2'"]),
    "a class without training images": ({"train_y": np.minimum(GOOD["train_y"], 1)}, ["'train_y'", "class '2'"]),
    "a named class without images": ({"classes": np.array(["a", "b", "c", "dodo"])}, ["'train_y'", "class 'dodo'"]),
    "a class without a name": ({"classes": np.array(["a", "b"])}, ["'train_y'", "label 2", "0..1"]),
    "classes that are numbers": ({"classes": np.arange(3)}, ["'classes'", "int64"]),
    "no class names": ({"classes": np.array([], dtype=str)}, ["'classes' is", "or be omitted"]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_in_an_array_is_one_line(defect, tmp_path):
    changes, says = DEFECTS[defect]
    path = write_npz(tmp_path / "own.npz", **changes)
    message = complaint(f"npz:{path}")
    assert message.startswith(f"{path}: ")
    assert [part for part in says if part not in message] == []


def test_a_class_name_that_is_given_twice_is_named(tmp_path):
    """Classes are told apart by their names where tasks are joined."""
    path = write_npz(tmp_path / "own.npz", classes=np.array(["rose", "rose", "iris"]))
    assert complaint(f"npz:{path}") == (
        f"{path}: 'classes': class name 'rose' is given twice; give each class its own name"
    )
    folders = [os.fsdecode(name) for name in (b"caf\xe9", b"caf\xe8")]  # neither is UTF-8
    write_folder(tmp_path / "own", [f"{part}/{name}/0.png" for part in ("train", "val") for name in folders])
    assert "class name 'caf\N{REPLACEMENT CHARACTER}' is given twice" in complaint(f"folder:{tmp_path / 'own'}")


@pytest.mark.parametrize(
    "name, meant",
    [
        ("npz", "npz:PATH"),
        ("npz:", "npz:PATH"),
        ("folder:", "folder:PATH"),
        ("digit", "digits"),
        ("cifar-100", "cifar100"),
        ("", "cifar10, cifar100"),
    ],
)
def test_an_unknown_name_lists_or_names_the_known(name, meant):
    message = complaint(name)
    assert f"'{name}'" in message and meant in message


def test_the_documented_names_are_registered():
    assert {"cifar100", "cifar10", "digits", "imagenet100"} <= set(registry.datasets)


# CIFAR


class FakeCifar:
    """torchvision's interface: ``data``, ``targets`` (a list) and ``classes``, and a count of the calls."""

    calls = 0
    arrays = small_arrays(100, 32, 2, 1)

    def __init__(self, root, train, download):
        assert download
        type(self).calls += 1
        part = "train" if train else "test"
        self.data, self.targets = self.arrays[f"{part}_x"], self.arrays[f"{part}_y"].tolist()
        self.classes = [f"class {k}" for k in range(100)]


def no_download(*args, **kwargs):
    pytest.fail("a download was tried")


@pytest.fixture
def fake_cifar(monkeypatch):
    monkeypatch.setattr(FakeCifar, "calls", 0)
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", FakeCifar)
    return FakeCifar


def equal(split, images, targets):
    return (
        np.array_equal(split.images, images)
        and np.array_equal(split.targets, targets)
        and split.targets.dtype == np.int64
    )


def test_of_two_processes_one_downloads_and_the_other_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", no_download)
    arrays = small_arrays(100, 32, 2, 1)
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path, ".cifar100.lock"):
            waiting = pool.submit(load_dataset, "cifar100", tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            np.savez(tmp_path / "cifar100.npz", **arrays)
        assert equal(waiting.result().train, arrays["train_x"], arrays["train_y"])


def test_a_folder_without_write_access_needs_no_lock(fake_cifar, tmp_path, monkeypatch):
    """torchvision may find its own files there."""
    monkeypatch.setattr("pycil_wsc.files.locked", Mock(side_effect=Unwritable("Permission denied")))
    assert equal(load_dataset("cifar100", tmp_path).train, FakeCifar.arrays["train_x"], FakeCifar.arrays["train_y"])


@pytest.mark.parametrize(
    "name, classes, mean, std",
    [
        ("cifar100", 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        ("cifar10", 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ],
)
def test_a_cifar_file_at_hand_is_read_without_a_download(name, classes, mean, std, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, name.upper(), no_download)
    arrays = small_arrays(classes, 32, 2, 1)
    np.savez(tmp_path / f"{name}.npz", **arrays)
    dataset = load_dataset(name, tmp_path)
    assert equal(dataset.train, arrays["train_x"], arrays["train_y"]) and equal(
        dataset.test, arrays["test_x"], arrays["test_y"]
    )
    info = dataset.info
    assert (info.name, info.num_classes, info.image_size, info.mean, info.std) == (name, classes, 32, mean, std)
    assert (info.crop, info.padding, info.flip, info.brightness) == ("pad", 4, True, 63 / 255)


def test_mnist_has_pixels_on_the_unit_scale_as_mammoths(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "MNIST", no_download)
    arrays = small_arrays(10, 28, 2, 1)
    np.savez(tmp_path / "mnist.npz", **(arrays | {name: arrays[name][..., 0] for name in ("train_x", "test_x")}))
    dataset = load_dataset("mnist", tmp_path)
    assert np.array_equal(dataset.train.images[..., 2], arrays["train_x"][..., 0])
    info = dataset.info
    assert (info.image_size, info.mean, info.std, info.padding, info.flip) == (28, (0,) * 3, (1,) * 3, 0, False)


def test_a_download_is_announced(fake_cifar, tmp_path, caplog):
    load_dataset("cifar100", str(tmp_path))
    assert "cifar100.npz: does not exist; downloading cifar100 with torchvision" in caplog.text


def test_cifar_is_downloaded_once_and_kept(fake_cifar, tmp_path):
    for _ in range(2):
        dataset = load_dataset("cifar100", str(tmp_path))
        assert equal(dataset.train, fake_cifar.arrays["train_x"], fake_cifar.arrays["train_y"])
        assert equal(dataset.test, fake_cifar.arrays["test_x"], fake_cifar.arrays["test_y"])
        assert dataset.info.classes[7] == "class 7"
        assert fake_cifar.calls == 2, "one for training, one for testing, and none when loaded again"
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["cifar100.npz"]
    with np.load(tmp_path / "cifar100.npz") as file:
        assert all(np.array_equal(file[name], array) for name, array in fake_cifar.arrays.items())


@pytest.mark.parametrize(
    "error, says",
    [
        (urllib.error.URLError("Name or service not known"), "Name or service not known"),
        (RuntimeError("File not found or corrupted."), "corrupted"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (TimeoutError("two\nlines"), "two lines"),
        (EOFError(), "EOFError"),
    ],
)
def test_a_failed_download_says_what_to_do(error, says, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", fail)
    message = complaint("cifar100", tmp_path)
    wanted = [
        str(tmp_path / "cifar100.npz"),
        says,
        "connect to the internet",
        "copy a file cifar100.npz",
        "train_x, train_y, test_x, test_y",
    ]
    assert [part for part in wanted if part not in message] == []
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("failing", ["numpy.savez", "os.replace"])
def test_a_full_disk_costs_the_file_but_not_the_run(failing, fake_cifar, tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, full)
    with caplog.at_level(logging.WARNING):
        dataset = load_dataset("cifar100", tmp_path)
    assert equal(dataset.train, fake_cifar.arrays["train_x"], fake_cifar.arrays["train_y"])
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert "No space left" in caplog.text and "cifar100.npz" in caplog.text


@pytest.mark.parametrize(
    "arrays, says",
    [
        (small_arrays(10, 32, 2, 1), "class '10'"),
        (small_arrays(101, 32, 2, 1), "label 100"),
        (small_arrays(100, 16, 2, 1), "side 16"),
        (small_arrays(100, 32, 2, 1) | {"classes": np.array(["a", "b"])}, "100 classes"),
    ],
)
def test_a_file_that_is_not_cifar_is_refused(arrays, says, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", no_download)
    np.savez(tmp_path / "cifar100.npz", **arrays)
    message = complaint("cifar100", tmp_path)
    assert message.startswith(str(tmp_path / "cifar100.npz")) and says in message


def test_a_damaged_cifar_file_is_not_replaced_behind_the_users_back(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", no_download)
    cut_short(tmp_path / "cifar100.npz")
    before = (tmp_path / "cifar100.npz").read_bytes()
    assert complaint("cifar100", tmp_path).startswith(str(tmp_path / "cifar100.npz"))
    assert (tmp_path / "cifar100.npz").read_bytes() == before


def test_images_in_memory_stay_as_they_are_and_tell_both_sizes(tmp_path):
    np.savez(tmp_path / "cifar100.npz", **FakeCifar.arrays)
    same, larger = (sized(load_dataset("cifar100", tmp_path), side) for side in (32, 64))
    assert (same.info.image_size, same.info.stored_size) == (32, None)
    assert (larger.info.image_size, larger.info.stored_size) == (64, 32)
    assert larger.train.images.shape[1:] == (32, 32, 3) and larger.fingerprint == same.fingerprint


# digits


def test_digits_are_scikit_learns_each_exactly_once():
    dataset, source = load_dataset("digits", "/nowhere"), load_digits()
    assert len(dataset.train) + len(dataset.test) == len(source.target) == 1797
    loaded = [
        (label, *(image[..., 0].ravel() // 15))
        for split in (dataset.train, dataset.test)
        for image, label in zip(split.images, split.targets)
    ]
    original = [(label, *image.ravel().astype(int)) for image, label in zip(source.images, source.target)]
    assert sorted(loaded) == sorted(original) and len(set(original)) == len(original), (
        "all are different: the parts are disjoint"
    )
    for split in (dataset.train, dataset.test):
        assert (
            (split.images == split.images[..., :1]).all()
            and split.images.max() == 240
            and (split.images % 15 == 0).all()
        )


def test_every_fifth_digit_of_each_class_is_for_testing():
    dataset, source = load_dataset("digits", "."), load_digits()
    for label in range(10):
        images = 15 * source.images[source.target == label]
        assert np.array_equal(dataset.test.images[dataset.test.targets == label][..., 2], images[4::5])
        assert np.array_equal(
            dataset.train.images[dataset.train.targets == label][..., 2], np.delete(images, np.s_[4::5], axis=0)
        )


def test_the_facts_of_digits():
    dataset = load_dataset("digits", ".")
    info, scaled = dataset.info, dataset.train.images / 255
    assert (info.name, info.classes, info.image_size) == ("digits", tuple("0123456789"), 8)
    assert (info.crop, info.padding, info.flip, info.brightness) == ("pad", 1, False, 0)
    assert np.allclose(info.mean, scaled.mean()) and np.allclose(info.std, scaled.std())
    assert (round(info.mean[0], 4), round(info.std[0], 4), len(dataset.train)) == (0.2872, 0.3540, 1442), (
        "as the docstring says"
    )


# fingerprints


def fingerprint(name, root="."):
    return load_dataset(name, root).fingerprint


def test_the_fingerprint_is_the_contents_whatever_the_file(tmp_path):
    arrays = small_arrays()
    write_npz(tmp_path / "one.npz")
    np.savez_compressed(tmp_path / "two.npz", **arrays | {"train_y": arrays["train_y"].astype(np.uint8)})
    write_npz(tmp_path / "named.npz", classes=np.array(["a", "b", "c"]))
    one = fingerprint(f"npz:{tmp_path / 'one.npz'}")
    assert (one["train"], one["test"]) == (12, 6) and len(one["sha256"]) == 16
    assert one == fingerprint(f"npz:{tmp_path / 'two.npz'}") == fingerprint(f"npz:{tmp_path / 'named.npz'}")


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_pixel_or_two_labels_make_other_data(part, tmp_path):
    arrays, path = small_arrays(), tmp_path / "own.npz"
    one = fingerprint(f"npz:{write_npz(path)}")
    images, labels = arrays[f"{part}_x"].copy(), arrays[f"{part}_y"].copy()
    images[3, 2, 1, 0] ^= 1
    first, second = (np.flatnonzero(labels == label)[0] for label in (0, 1))
    labels[[first, second]] = labels[[second, first]]
    others = [
        fingerprint(f"npz:{write_npz(path, **{name: value})}")
        for name, value in ((f"{part}_x", images), (f"{part}_y", labels))
    ]
    assert all(changed(one, other) for other in others) and changed(*others)
    assert not changed(one, one) and not changed(None, one) and not changed(one, None)


def test_the_hash_is_kept_beside_the_file_until_the_file_changes(tmp_path, monkeypatch):
    path, counted = write_npz(tmp_path / "own.npz"), []
    compute = fingerprints.fingerprint
    monkeypatch.setattr(fingerprints, "fingerprint", lambda *splits: counted.append(1) or compute(*splits))
    written = os.stat(path).st_mtime
    monkeypatch.setattr(fingerprints.time, "time", lambda: written)
    one = fingerprint(f"npz:{path}")
    assert fingerprint(f"npz:{path}") == one and len(counted) == 2, (
        "just written: it may change within the clock's tick"
    )
    monkeypatch.setattr(fingerprints.time, "time", lambda: written + 60)
    assert [fingerprint(f"npz:{path}") for _ in range(3)] == [one] * 3 and len(counted) == 3
    write_npz(path, train_x=255 - small_arrays()["train_x"])
    other = fingerprint(f"npz:{path}")
    assert changed(one, other) and len(counted) == 4
    (tmp_path / ".own.npz.fingerprint").write_text('{"size": 3')
    assert fingerprint(f"npz:{path}") == other


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise UserError("read-only")

    path = write_npz(tmp_path / "own.npz")
    monkeypatch.setattr(fingerprints, "SETTLED", -60)
    monkeypatch.setattr(fingerprints, "write_atomically", refuse)
    assert fingerprint(f"npz:{path}")["train"] == 12 and [file.name for file in tmp_path.iterdir()] == ["own.npz"]


def test_image_files_are_known_by_their_places_and_sizes(tmp_path):
    image_folder(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # with other modification times
    one = fingerprint(f"folder:{tmp_path / 'one'}")
    assert one == fingerprint(f"folder:{tmp_path / 'two'}") and (one["train"], one["test"]) == (7, 4)
    (tmp_path / "two" / "val" / "b" / "0.png").write_bytes(b"another")
    other = fingerprint(f"folder:{tmp_path / 'two'}")
    (tmp_path / "one" / "train" / "b" / "2.png").rename(tmp_path / "one" / "train" / "b" / "3.png")
    assert changed(one, other) and changed(one, fingerprint(f"folder:{tmp_path / 'one'}"))


# folders

FILES = ["b/2.png", "b/10.png", "b/x.JPEG", "a/z.jpg", "a/deep/a.PNG", "C/1.png", "a/A.png"]


def image_folder(root, test="val"):
    write_folder(root / "train", FILES)
    write_folder(root / test, ["a/1.png", "b/0.png", "b/00.jpg", "C/1.png"])
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "README.txt").write_text("no class")
    return root


@pytest.mark.parametrize("test", ["val", "test"])
def test_folders_are_read_in_torchvisions_order(test, tmp_path):
    dataset = load_dataset(f"folder:{image_folder(tmp_path, test)}", "/nowhere")
    for split, part in ((dataset.train, "train"), (dataset.test, test)):
        expected = ImageFolder(tmp_path / part)
        assert list(zip(split.images, split.targets)) == expected.samples
        assert list(dataset.info.classes) == expected.classes and not split.in_memory and len(split) == len(expected)
    order = ["C/1.png", "a/A.png", "a/z.jpg", "a/deep/a.PNG", "b/10.png", "b/2.png", "b/x.JPEG"]
    assert [str(Path(path).relative_to(tmp_path / "train")) for path in dataset.train.images] == order
    assert dataset.train.targets.tolist() == [0, 1, 1, 1, 2, 2, 2] and dataset.train.targets.dtype == np.int64


def test_a_class_folder_whose_name_is_not_utf8_has_one_that_can_be_printed(tmp_path):
    names = ["a", os.fsdecode(b"caf\xe9")]
    write_folder(tmp_path, [f"{part}/{name}/0.png" for part in ("train", "val") for name in names])
    dataset = load_dataset(f"folder:{tmp_path}", ".")
    assert dataset.info.classes == ("a", "caf\N{REPLACEMENT CHARACTER}")
    assert [decode(path).size for path in dataset.train.images] == [(12, 9)] * 2


def test_a_dangling_image_link_is_named(tmp_path):
    image_folder(tmp_path)
    (tmp_path / "train" / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    message = complaint(f"folder:{tmp_path}")
    assert message.startswith(f"{tmp_path}/train/a/gone.png: No such file or directory")


BAD_PATHS = {
    "~nosuchuser/x": "home folder of an unknown user",
    "a\0b": "zero byte",
    "a\ud800": "no file name can have",
    "a\udcff": "[Nn]o such file",  # noqa: F601  ruff takes all lone surrogates for one
    "x" * 300: "File name too long",
    "line\nbreak": "[Nn]o such file",
}


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("name", ["npz:{}", "folder:{}"])
def test_a_path_that_cannot_be_is_one_line(name, path):
    assert re.search(BAD_PATHS[path], complaint(name.format(path)))


@pytest.mark.parametrize("root", ["~nosuchuser/x", "a\0b", "a\ud800", "x" * 300])
def test_a_root_that_cannot_be_is_one_line(root):
    assert re.search(BAD_PATHS[root], complaint("imagenet100", root))


def test_val_comes_before_test(tmp_path):
    image_folder(tmp_path)
    write_folder(tmp_path / "test", ["unlabelled/0.png"])
    assert len(load_dataset(f"folder:{tmp_path}", ".").test) == 4


def test_the_facts_of_folders(tmp_path):
    info = load_dataset(f"folder:{image_folder(tmp_path)}", ".").info
    assert (info.name, info.classes, info.image_size) == (f"folder:{tmp_path}", ("C", "a", "b"), 224)
    assert (info.crop, info.padding, info.flip, info.brightness) == ("resized", 0, True, 0)
    assert (info.mean, info.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert sized(load_dataset(f"folder:{tmp_path}", "."), 64).info == dataclasses.replace(info, image_size=64)


@pytest.mark.parametrize("key", ["padding", "brightness"])
def test_what_image_files_do_not_have_is_refused(key, tmp_path):
    with pytest.raises(UserError, match=f"{key}: has no effect on image files, .*; leave the key out"):
        Datasets().of(resolve({"dataset": f"folder:{image_folder(tmp_path)}", key: 1}))


def test_imagenet100_is_the_folder_below_the_root(tmp_path):
    image_folder(tmp_path / "imagenet100")
    dataset = load_dataset("imagenet100", tmp_path)
    assert dataset.info == dataclasses.replace(
        load_dataset(f"folder:{tmp_path / 'imagenet100'}", ".").info, name="imagenet100"
    )
    assert all(Path(path).is_file() for path in dataset.train.images)
    shutil.rmtree(tmp_path / "imagenet100")
    assert complaint("imagenet100", tmp_path).startswith(str(tmp_path / "imagenet100"))


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


FOLDER_DEFECTS = {  # -> (damage to the data, path in the message, another part of the message)
    "no such folder": (shutil.rmtree, "train", "No such file"),
    "no training part": (lambda root: shutil.rmtree(root / "train"), "train", "No such file"),
    "no test part": (lambda root: shutil.rmtree(root / "val"), "val", "No such file"),
    "no classes": (lambda root: emptied(root / "train"), "train", "no class folders"),
    "a class not in train": (lambda root: shutil.rmtree(root / "train" / "b"), "train", "class 'b'"),
    "a class not in val": (lambda root: shutil.rmtree(root / "val" / "b"), "val", "class 'b'"),
    "an empty class in train": (lambda root: emptied(root / "train" / "a"), "train", "class 'a'"),
    "an empty class in val": (lambda root: emptied(root / "val" / "C"), "val", "class 'C'"),
    "a class empty in both": (
        lambda root: [(root / part / "new").mkdir() for part in ("train", "val")],
        "train",
        "class 'new'",
    ),
    "a class of other files": (
        lambda root: (root / "val" / "C" / "1.png").rename(root / "val" / "C" / "1.tga"),
        "val",
        ".webp), only 1 .tga; add some",
    ),
}


@pytest.mark.parametrize("defect", FOLDER_DEFECTS)
def test_a_defect_in_a_folder_is_one_line(defect, tmp_path):
    root = image_folder(tmp_path / "own")
    harm, part, says = FOLDER_DEFECTS[defect]
    harm(root)
    message = complaint(f"folder:{root}")
    assert message.startswith(f"{root / part}: ") and says in message


# one task's images

GREY, COLOUR = np.zeros((28, 28), np.uint8), np.zeros((32, 32, 3), np.uint8)


class Samples(torch.utils.data.Dataset):
    """A map-style data set of these samples."""

    def __init__(self, samples, classes=None):
        self.samples = samples
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


SOURCES = {  # the message -> the source
    "labels: class name '1' is given twice; give each class its own name": ([COLOUR] * 2, [1, "1"]),
    "Samples: class name 'rose' is given twice; give each class its own name": Samples(
        [(COLOUR, 0), (COLOUR, 1)], ["rose", "rose", "iris"]
    ),
    "images: shapes (28, 28, 3) and (32, 32, 3); resize them to one size": ([COLOUR, COLOUR[:28, :28]], ["a", "b"]),
    "images: shapes (28, 28) and (32, 32, 3); resize them to one size": ([torch.from_numpy(COLOUR), GREY], ["a", "b"]),
    "images: an item is not an array; give uint8 (N, side, side, 3) or a list of file names": ([[[1, 2], [3]]], ["a"]),
    "images: item 2 is not a file name, as others are; give uint8 (N, side, side, 3) or a list of file names": (
        ["a.png", COLOUR],
        ["a", "b"],
    ),
    "Samples: item 0 is 3 values; return (image, label)": Samples([(0, COLOUR, 1)]),
    "Samples: item 1 is a ndarray; return (image, label)": Samples([(COLOUR, 0), COLOUR]),
    "images: 5 is not a list; give uint8 (N, side, side, 3) or a list of file names": (5, [0]),
    "images: 7 is not a list; give uint8 (N, side, side, 3) or a list of file names": (np.array(7), [0]),
    "images: 'rose.png' is not a list; give uint8 (N, side, side, 3) or a list of file names": ("rose.png", ["rose"]),
    "labels: 3 is not a list; give one label per image": ([COLOUR], 3),
}


@pytest.mark.parametrize("message", SOURCES)
def test_images_that_cannot_be_a_task_are_one_line(message):
    with pytest.raises(UserError) as caught:
        read_source(SOURCES[message])
    assert one_line(caught.value) == message


KINDS = {
    "list": list,
    "array": np.stack,
    "tensor": torch.from_numpy,
    "list of tensors": lambda images: [torch.from_numpy(each) for each in images],
    "tensor, channels first": lambda images: torch.from_numpy(images.transpose(0, 3, 1, 2)),
    "list of tensors, channels first": lambda images: [torch.from_numpy(each.transpose(2, 0, 1)) for each in images],
}


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_an_array_or_a_list_of_arrays_or_tensors(kind):
    images = small_arrays()["train_x"]
    labels = [f"class {number % 3}" for number in range(12)]
    task = read_source((KINDS[kind](images), labels))
    assert np.array_equal(task.train.images, images) and task.info.classes == ("class 0", "class 1", "class 2")
    assert task.fingerprint == read_source((images, labels)).fingerprint


def test_three_grey_images_of_a_tensor_are_three():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    task = read_source((torch.from_numpy(images), [0, 1, 2]))
    assert np.array_equal(task.train.images[..., 0], images)


def test_unused_names_of_a_torch_data_set_may_be_equal():
    task = read_source(Samples([(COLOUR, 2), (COLOUR, 1)], ["", "rose", "iris", ""]))
    assert task.info.classes == ("iris", "rose")


# decoding


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_kind_of_image_becomes_rgb(mode, tmp_path):
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)).convert(mode)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    colours.save(path)
    image = decode(str(path))
    assert image.mode == "RGB" and image.size == (7, 5)
    assert np.array_equal(np.asarray(image), np.asarray(colours.convert("RGB")))


def cut_image(path, suffix):
    write_folder(path.parent, [path.name + suffix])
    content = (path.parent / (path.name + suffix)).read_bytes()
    path.write_bytes(content[: len(content) // 2])


BAD_IMAGES = {
    "absent": lambda path: None,
    "a folder": Path.mkdir,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>404</html>"),
    "half a jpeg": lambda path: cut_image(path, ".jpg"),
    "half a png": lambda path: cut_image(path, ".png"),
    "a bomb": lambda path: path.write_bytes(b"P6\n60000 60000\n255\n"),
    "a broken header": lambda path: path.write_bytes(b"P6\n4 x\n255\n"),
    "16 bits": lambda path: Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(path, "PNG"),
    "floats": lambda path: Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(path, "TIFF"),
}


@pytest.mark.parametrize("defect", BAD_IMAGES)
def test_an_image_that_cannot_be_decoded_is_named(defect, tmp_path):
    path = tmp_path / "image"
    BAD_IMAGES[defect](path)
    with pytest.raises(UserError) as caught:
        decode(str(path))
    message = one_line(caught.value)
    problems = {"absent": "No such file", "a folder": "is not a file", "16 bits": "8 bits", "floats": "8 bits"}
    problems["a bomb"] = "too large (Image size (3600000000 pixels)"
    assert message.startswith(f"{path}: ") and problems.get(defect, "not a readable image") in message


def test_small_cifar_has_the_means_of_two_by_two_pixels(tmp_path):
    """A loop over pixels is the reference; halves are rounded up, and the fingerprint is that of the small images."""
    arrays = small_arrays(100, 32, 2, 1)
    np.savez(tmp_path / "cifar100.npz", **arrays)
    large, small = (load_dataset(name, tmp_path) for name in ("cifar100", "cifar100_16"))
    assert small.train.images.shape == (200, 16, 16, 3) and small.test.targets.tolist() == large.test.targets.tolist()
    for image, halved in zip(large.train.images[:3], small.train.images):
        for row, column, channel in np.ndindex(halved.shape):
            block = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2, channel].astype(int)
            assert halved[row, column, channel] == math.floor(block.mean() + 0.5)
    assert (small.info.image_size, small.info.padding, small.info.stored_size) == (16, 2, None)
    assert small.fingerprint != large.fingerprint


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"split": {"images": np.zeros((6, 8, 8, 3))}}, "'train_x' is float64 of shape (6, 8, 8, 3)"),
        ({"split": {"images": np.zeros((6, 3, 8, 8), np.uint8)}}, "'train_x' is uint8 of shape (6, 3, 8, 8)"),
        ({"split": {"targets": np.arange(5) % 3}}, "6 images in 'train_x', but 5 labels in 'train_y'"),
        ({"split": {"targets": np.arange(6) % 3 + 1}}, "'train_y': label 3 is not in 0..2"),
        ({"split": {"targets": np.arange(6) % 2}}, "'train_y': class 'c' has no samples"),
        ({"split": {"targets": np.array(list("abcabc"))}}, "labels must be integers"),
        ({"split": {"images": np.array(list("abcdef")), "targets": np.arange(6)}}, "'train_y': label 3 is not"),
        ({"info": {"classes": ("a", "a", "b")}}, "class name 'a' is given twice"),
        ({"info": {"crop": "center"}}, "crop is 'center'; give one of pad, resized"),
        ({"info": {"mean": (125, 123, 114)}}, "must be on the 0..1 scale"),
        ({"info": {"image_size": 16}}, "image_size is 16, but the images have side 8"),
        (None, "its function returned tuple; return a Dataset"),
    ],
)
def test_a_defect_of_a_registered_data_set_is_one_line(changes, line, monkeypatch):
    info = DatasetInfo("mine", ("a", "b", "c"), 8, (0.5,) * 3, (0.5,) * 3, "pad", 1, flip=False, brightness=0.0)
    split = Split(np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 3)
    sound = Dataset(info, split, split)
    wrong = dataclasses.replace(split, **(changes or {}).get("split", {}))
    changed = dataclasses.replace(info, **(changes or {}).get("info", {}))
    returned = dataclasses.replace(sound, info=changed, train=wrong) if changes else (split, split)
    for name, dataset in (("sound", sound), ("mine", returned)):
        monkeypatch.setitem(registry.datasets._entries, name, lambda root, dataset=dataset: dataset)
    assert load_dataset("sound", ".").train.targets.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UserError, match=re.escape(line)) as error:
        load_dataset("mine", ".")
    assert str(error.value).startswith("dataset 'mine': ") and "\n" not in str(error.value)
