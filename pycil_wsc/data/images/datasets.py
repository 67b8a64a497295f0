"""Loads data sets by name, as arrays in memory or lists of image files.

* ``cifar100``, ``cifar10``: ``<data_root>/<name>.npz``, made from torchvision's download if it does not exist
* ``cifar100_16``: ``cifar100`` reduced to 16 pixels, for experiments on small computers
* ``mnist``: ``<data_root>/mnist.npz``, likewise
* ``digits``: scikit-learn's 8x8 digits, without a file or a download
* ``imagenet100``: ``<data_root>/imagenet100/{train,val}/<wnid>/*.JPEG``
* ``npz:PATH``: your own arrays, in a file made by ``np.savez`` (described in :mod:`pycil_wsc.data.images.npz`)
* ``folder:PATH``: your own images, ``PATH/{train,val}/<class>/*.jpg``
"""

import http.client
import importlib.util
import logging
import os
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from pycil_wsc.data.images.fingerprint import fingerprint, fingerprint_of_file
from pycil_wsc.data.images.image_files import read_folder
from pycil_wsc.data.images.npz import (
    ARRAYS,
    check_arrays,
    info_of_arrays,
    mean_and_std,
    read_npz,
    reason,
    three_channels,
)
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked_if_writable
from pycil_wsc.registry import check_dataset, datasets, register_dataset

__all__ = ["Dataset", "DatasetInfo", "Split", "load_dataset"]
CROPS = ("pad", "resized")
DOWNLOAD_ERRORS = (OSError, RuntimeError, ValueError, EOFError)
DOWNLOAD_ERRORS += (http.client.HTTPException, tarfile.TarError, zlib.error)


def load_dataset(name: str, data_root: str | Path) -> Dataset:
    """Load the data set ``name``: a registered one, ``npz:PATH`` or ``folder:PATH``.

    Args:
        name: the data set.
        data_root: folder of the registered data sets.

    Raises:
        UserError: if the data are missing or invalid; names the file and the remedy.
    """
    kind, _, path = name.partition(":")
    if path and kind == "npz":
        dataset = _npz(name, path_of("dataset", path))
    elif path and kind == "folder":
        dataset = read_folder(name, path_of("dataset", path))
    else:
        check_dataset(name)
        dataset = _checked(name, datasets[name](path_of("data_root", str(data_root))))
    if dataset.fingerprint is None:
        dataset = replace(dataset, fingerprint=fingerprint(dataset.train, dataset.test))
    return dataset


def _checked(name: str, dataset: object) -> Dataset:
    """What a registered function has returned. Raises a :class:`UserError` if it cannot be trained and tested on."""
    place = f"dataset '{name}'"
    if not isinstance(dataset, Dataset):
        raise UserError(f"{place}: its function returned {type(dataset).__name__}; return a Dataset")
    info = dataset.info
    if info.crop not in CROPS:
        raise UserError(f"{place}: crop is {info.crop!r}; give one of {', '.join(CROPS)}")
    if not all(0 <= mean <= 1 for mean in info.mean) or not all(0 < std <= 1 for std in info.std):
        raise UserError(
            f"{place}: mean {info.mean} and std {info.std} must be on the 0..1 scale, and std above 0; divide those of "
            "0..255 by 255"
        )
    splits = {"train": dataset.train, "test": dataset.test}
    kind = np.asarray(dataset.train.images).dtype.kind
    if kind == "O":
        raise UserError(f"{place}: images are objects; give uint8 arrays, or paths as strings")
    in_memory = kind != "U"  # otherwise paths
    arrays = {"classes": np.asarray(info.classes)}
    for part, split in splits.items():
        images = split.images if in_memory else np.zeros((len(split.images), 1, 1, 3), np.uint8)
        arrays |= {f"{part}_x": np.asarray(images), f"{part}_y": np.asarray(split.targets)}
    _, *checked = check_arrays(place, arrays, info.num_classes)
    side = checked[0].images.shape[1]
    name = "stored_size" if info.stored_size else "image_size"
    if in_memory and side != getattr(info, name):
        raise UserError(f"{place}: {name} is {getattr(info, name)}, but the images have side {side}; give this side")
    for (part, split), new in zip(splits.items(), checked):
        images = new.images if in_memory else np.asarray(split.images)
        splits[part] = replace(split, images=images, targets=new.targets)
    return replace(dataset, **splits)


def sized(dataset: Dataset, side: int) -> Dataset:
    """``dataset`` with images of ``side``: files are decoded to this size, arrays are resized after augmentation."""
    stored = dataset.train.images.shape[1] if dataset.train.in_memory else side
    return replace(
        dataset,
        info=replace(dataset.info, image_size=side, stored_size=stored if stored != side else None),
    )


def path_of(key: str, text: str) -> Path:
    """Convert ``text`` to a path, or raise a :class:`UserError` if no file can have that path."""
    try:
        path = Path(text).expanduser()
        os.fsencode(path)
    except RuntimeError:
        raise UserError(f"{key}: '{text}' begins with the home folder of an unknown user; give the full path") from None
    except UnicodeEncodeError:
        raise UserError(f"{key}: {text!r} has characters that no file name can have; correct the path") from None
    if "\0" in text:
        raise UserError(f"{key}: {text!r} has a zero byte, which no file name can have; correct the path")
    return path


@register_dataset("cifar100")
def _cifar100(root: Path) -> Dataset:
    return _cifar(root, "cifar100", 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


@register_dataset("cifar100_16")
def _cifar100_16(root: Path) -> Dataset:
    """CIFAR-100 with half the side: each pixel is the mean of 2x2 pixels. The random crop moves by half as much, too.

    Mean and standard deviation are those of CIFAR-100.
    """
    whole = _cifar100(root)
    info = replace(whole.info, name="cifar100_16", image_size=16, padding=2)
    train, test = (Split(_halved(split.images), split.targets) for split in (whole.train, whole.test))
    return Dataset(info, train, test)


def _halved(images: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, C) -> (N, H / 2, W / 2, C), the rounded mean of 2x2 pixels."""
    total = np.full_like(images[:, ::2, ::2], 2, dtype=np.uint16)  # four strided parts: reshape and sum are slower
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        total += images[:, row::2, column::2]
    total >>= 2
    return total.astype(np.uint8)


@register_dataset("cifar10")
def _cifar10(root: Path) -> Dataset:
    return _cifar(root, "cifar10", 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


@register_dataset("mnist")
def _mnist(root: Path) -> Dataset:
    """MNIST as Mammoth has it: pixels on the 0..1 scale, not normalised and not augmented; on three channels here."""
    plain = {"crop": "pad", "padding": 0, "flip": False, "brightness": 0.0}
    return _of_torchvision(root, "mnist", 10, 28, {"mean": (0.0,) * 3, "std": (1.0,) * 3} | plain)


def _cifar(root, name, num_classes, mean, std):
    """CIFAR with PyCIL's constants and transforms."""
    transforms = {"mean": mean, "std": std, "crop": "pad", "padding": 4, "flip": True, "brightness": 63 / 255}
    return _of_torchvision(root, name, num_classes, 32, transforms)


def _of_torchvision(root, name, num_classes, side, transforms):
    """A data set that torchvision downloads. After that, only the npz file is read."""
    path = root / f"{name}.npz"
    downloaded = None
    if not os.path.lexists(path):
        with locked_if_writable(root, f".{name}.lock"):  # another process may be downloading it
            if not os.path.lexists(path):
                downloaded = _download(path, name)
    arrays, read = (downloaded, None) if downloaded else read_npz(path)
    classes, train, test = check_arrays(path, arrays, num_classes)
    width = train.images.shape[1]
    if width != side:
        raise UserError(
            f"{path}: images of side {width}, but those of {name} have {side}; use 'npz:{path}' for your own data"
        )
    info = DatasetInfo(name, classes, side, **transforms)
    return Dataset(info, train, test, fingerprint=read and fingerprint_of_file(path, read, train, test))


def _download(path: Path, name: str) -> dict[str, np.ndarray]:
    """Download the arrays with torchvision, which verifies checksums, and store them in ``path`` for the next run."""
    logging.getLogger("pycil_wsc").warning(f"{path}: does not exist; downloading {name} with torchvision")
    try:
        from torchvision import datasets as downloads

        source = getattr(downloads, name.upper())
        train, test = (source(root=path.parent, train=part, download=True) for part in (True, False))
    except DOWNLOAD_ERRORS as error:
        names = ", ".join(ARRAYS)
        remedy = f"connect to the internet, or copy a file {path.name} with the arrays {names} into {path.parent}"
        raise UserError(f"{path}: does not exist, and the download failed ({reason(error)}); {remedy}") from None
    arrays: dict[str, np.ndarray] = dict(
        zip((*ARRAYS, "classes"), map(np.asarray, (train.data, train.targets, test.data, test.targets, train.classes)))
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(partial, path)
    except OSError as error:  # a full or read-only disk: this run can still use the images
        logging.getLogger("pycil_wsc").warning(
            f"{path}: cannot be written ({reason(error)}); the next run will prepare {name} again"
        )
    finally:
        if os.path.lexists(partial):  # unlink, even with missing_ok, fails on a read-only file system
            partial.unlink()
    return arrays


@register_dataset("digits")
def _digits(root: Path) -> Dataset:
    """scikit-learn's 1,797 digits; every fifth sample of each class is a test sample. Nothing is read from ``root``.

    Pixels 0..16 are scaled to 0..240 (times 15, so nothing is clipped) and repeated on three channels. Mean and
    standard deviation are those of the 1,442 training images: 0.2872 and 0.3540.
    """
    pixels, targets = _load_digits()
    images = three_channels((15 * pixels).astype(np.uint8).reshape(-1, 8, 8))
    chosen = np.sort(np.concatenate([np.flatnonzero(targets == label)[4::5] for label in range(10)]))
    train = Split(np.delete(images, chosen, 0), np.delete(targets, chosen))
    test = Split(images[chosen], targets[chosen])
    mean, std = mean_and_std(train.images)
    info = DatasetInfo("digits", tuple("0123456789"), 8, mean, std, crop="pad", padding=1, flip=False, brightness=0.0)
    return Dataset(info, train, test)


def _load_digits():
    """What ``sklearn.datasets.load_digits`` returns, from its file: to import scikit-learn takes longer than torch.

    float64 (1797, 64) and int64 (1797,).
    """
    package = importlib.util.find_spec("sklearn")
    folder = Path(package.origin).parent if package is not None and package.origin else Path()
    try:
        table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    except FileNotFoundError:  # another version of scikit-learn
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    return table[:, :-1], table[:, -1].astype(np.int64)


@register_dataset("imagenet100")
def _imagenet100(root: Path) -> Dataset:
    """ImageNet-100 in folders named by wnid; labels follow the sorted wnids.

    At least five class lists have this name (PyCIL's and FOSTER's, PODNet's, UCIR's, BiC's, and Kaggle's, which the
    authors of Weight Space Consolidation used). The folder decides which one is used.
    """
    return read_folder("imagenet100", root / "imagenet100")


def _npz(name, path):
    """The user's own arrays."""
    arrays, read = read_npz(path)
    classes, train, test = check_arrays(path, arrays)
    info = info_of_arrays(name, classes, train.images)
    return Dataset(info, train, test, fingerprint=fingerprint_of_file(path, read, train, test))
