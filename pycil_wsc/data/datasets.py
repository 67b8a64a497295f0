"""Data sets: a name -> arrays in memory, or lists of files, and the facts of the set in one frozen record.

* ``cifar100``, ``cifar10``: ``<data_root>/<name>.npz``, made from torchvision's download where it is not there
* ``digits``: scikit-learn's 8x8 digits, without a file or a download
* ``imagenet100``: ``<data_root>/imagenet100/{train,val}/<wnid>/*.JPEG``
* ``npz:PATH``: arrays of your own, train_x, train_y, test_x and test_y, in a file made by ``np.savez``
* ``folder:PATH``: images of your own, ``PATH/{train,val}/<class>/*.jpg``
"""

import http.client
import logging
import os
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torchvision
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from pycil_wsc.errors import UserError
from pycil_wsc.registry import datasets, register_dataset

ARRAYS = ("train_x", "train_y", "test_x", "test_y")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True)
class DatasetInfo:
    """The facts of a data set. ``image_size`` is the side of the square images after the transforms.

    ``crop`` is "pad" (zero-pad by ``padding``, random crop; test images as they are) or "resized" (``RandomResizedCrop``;
    test images with the short side resized to ``round(image_size * 256 / 224)``, then the centre). ``mean`` and ``std`` are on
    the 0..1 scale. ``brightness`` is ``ColorJitter``'s: a factor uniform in 1 +- brightness.
    """

    name: str
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: str
    padding: int
    flip: bool
    brightness: float

    @property
    def num_classes(self):
        return len(self.classes)


@dataclass(frozen=True, eq=False)
class Split:
    """``images``: uint8 (N, H, W, 3), or N paths as an array of str; ``targets``: int64 (N,)."""

    images: np.ndarray
    targets: np.ndarray

    def __len__(self):
        return len(self.targets)

    @property
    def in_memory(self):
        return self.images.dtype == np.uint8


@dataclass(frozen=True, eq=False)
class Dataset:
    """``held_out``: the share of the training samples that stand in the test split's place (:mod:`pycil_wsc.data.validation`), or 0."""

    info: DatasetInfo
    train: Split
    test: Split
    held_out: float = 0.0


def load_dataset(name, data_root, image_size=None):
    """The :class:`Dataset` called ``name``: a registered one, ``npz:PATH`` or ``folder:PATH``.

    ``image_size`` sets the side of images read from files; None is the data set's own. Whatever is wrong with the data is a
    :class:`UserError` of one line that names the file and the remedy.
    """
    kind, _, path = name.partition(":")
    if path and kind == "npz":
        dataset = _npz(name, Path(path).expanduser())
    elif path and kind == "folder":
        dataset = _folder(name, Path(path).expanduser())
    else:
        dataset = datasets[name](Path(data_root).expanduser())
    if image_size in (None, dataset.info.image_size):
        return dataset
    if dataset.train.in_memory:
        raise UserError(
            f"image_size: {image_size} cannot be had, the images of '{name}' have a side of {dataset.info.image_size}; set it to null"
        )
    return replace(dataset, info=replace(dataset.info, image_size=image_size))


@register_dataset("cifar100")
def _cifar100(root):
    return _cifar(root, "cifar100", 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


@register_dataset("cifar10")
def _cifar10(root):
    return _cifar(root, "cifar10", 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def _cifar(root, name, num_classes, mean, std):
    """CIFAR with PyCIL's constants and transforms. Once downloaded, the npz file is all that is read."""
    path = root / f"{name}.npz"
    arrays = _read_npz(path) if os.path.lexists(path) else _download_cifar(path, name)
    classes, train, test = _check_arrays(path, arrays, num_classes)
    if train.images.shape[1] != 32:
        raise UserError(
            f"{path}: images of side {train.images.shape[1]}, those of {name} have 32; use 'npz:{path}' for data of your own"
        )
    return Dataset(
        DatasetInfo(name, classes, 32, mean, std, crop="pad", padding=4, flip=True, brightness=63 / 255), train, test
    )


def _download_cifar(path, name):
    """The arrays from torchvision (which compares checksums), also written to ``path`` for the next time."""
    try:
        source = getattr(torchvision.datasets, name.upper())
        train, test = (source(root=path.parent, train=part, download=True) for part in (True, False))
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        http.client.HTTPException,
        tarfile.TarError,
        zlib.error,
    ) as error:
        remedy = f"connect to the internet, or copy a file {path.name} with the arrays {', '.join(ARRAYS)} into {path.parent}"
        raise UserError(f"{path}: not there, and the download failed ({_reason(error)}); {remedy}") from None
    arrays = dict(
        zip((*ARRAYS, "classes"), map(np.asarray, (train.data, train.targets, test.data, test.targets, train.classes)))
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, path)
    except OSError as error:  # a full or read-only disk: the images are here all the same
        logging.getLogger("pycil_wsc").warning(
            f"{path}: cannot be written ({_reason(error)}); the next run prepares {name} anew"
        )
    finally:
        if os.path.lexists(partial):  # unlink, even with missing_ok, fails on a read-only file system
            partial.unlink()
    return arrays


@register_dataset("digits")
def _digits(root):
    """scikit-learn's 1,797 digits; every fifth sample of each class is for testing. Nothing is read from ``root``.

    The pixels 0..16 become 0..240 (times 15, within 255, so nothing is clipped), on three equal channels. Mean and standard
    deviation are those of the 1,442 training images: 0.2872 and 0.3540.
    """
    from sklearn.datasets import load_digits  # here, because it takes a second

    pixels, targets = load_digits(return_X_y=True)
    images = _three_channels((15 * pixels).astype(np.uint8).reshape(-1, 8, 8))
    held_out = np.sort(np.concatenate([np.flatnonzero(targets == label)[4::5] for label in range(10)]))
    train = Split(np.delete(images, held_out, 0), np.delete(targets, held_out))
    test = Split(images[held_out], targets[held_out])
    mean, std = _mean_and_std(train.images)
    return Dataset(
        DatasetInfo("digits", tuple("0123456789"), 8, mean, std, crop="pad", padding=1, flip=False, brightness=0.0),
        train,
        test,
    )


@register_dataset("imagenet100")
def _imagenet100(root):
    """ImageNet-100 in folders named by wnid; labels follow the sorted wnids.

    The name stands for at least five lists of classes (PyCIL's and FOSTER's, PODNet's, UCIR's, BiC's, and Kaggle's, which the
    authors of Weight Space Consolidation used). Ours is whatever the folder holds.
    """
    return _folder("imagenet100", root / "imagenet100")


def _npz(name, path):
    """A user's own arrays, augmented without regard to what they show: pad an eighth, random crop, flip."""
    classes, train, test = _check_arrays(path, _read_npz(path))
    side = train.images.shape[1]
    mean, std = _mean_and_std(train.images)
    return Dataset(
        DatasetInfo(name, classes, side, mean, std, crop="pad", padding=side // 8, flip=True, brightness=0.0),
        train,
        test,
    )


def _folder(name, path):
    """``train`` and ``val`` (or ``test``, where there is no ``val``) with one folder of images a class, as torchvision's ``ImageFolder``."""
    train = path / "train"
    test = path / ("test" if (path / "test").is_dir() and not (path / "val").is_dir() else "val")
    classes = tuple(sorted(_class_folders(train) | _class_folders(test)))
    splits = []
    for part in (train, test):
        files = make_dataset(part, {folder: k for k, folder in enumerate(classes)}, IMG_EXTENSIONS, allow_empty=True)
        targets = np.array([target for _, target in files], dtype=np.int64)
        _check_targets(
            part,
            targets,
            classes,
            f"has no image files ({' '.join(IMG_EXTENSIONS)}); add some, or remove the class's folder from both parts",
        )
        splits.append(Split(np.array([file for file, _ in files]), targets))
    return Dataset(
        DatasetInfo(name, classes, 224, **IMAGENET, crop="resized", padding=0, flip=True, brightness=0.0), *splits
    )


def decode(path):
    """The image in a file, as RGB: a :class:`PIL.Image.Image`."""
    try:
        with Image.open(path) as image:
            if not image.mode.startswith(("I", "F")):
                return image.convert("RGB")
            problem = f"more than 8 bits a pixel (mode {image.mode}), which would be cut off at 255; scale it to 8 bits"
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        problem = f"not a readable image ({_reason(error)}); replace the file, or remove it"
    raise UserError(f"{path}: {problem}")


def _read_npz(path):
    """The arrays of an npz file by name: the four of ``ARRAYS``, and ``classes`` where it has them."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("no zip archive, or one cut short")
            file.seek(0)
            npz = np.load(file, allow_pickle=False)
            missing = [name for name in ARRAYS if name not in npz]
            if missing:
                raise UserError(
                    f"{path}: no array '{missing[0]}', only {list(npz)}; save {', '.join(ARRAYS)} with np.savez"
                )
            return {name: _array(path, npz, name) for name in (*ARRAYS, "classes") if name in npz}
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file (a relative path starts at {os.getcwd()}); make it with np.savez of {', '.join(ARRAYS)}"
        ) from None
    except MemoryError as error:
        raise UserError(
            f"{path}: does not fit in memory ({_reason(error)}); use image files and 'folder:PATH'"
        ) from None
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: not a whole npz file of plain arrays ({_reason(error)}); make it again with np.savez, or copy it again"
        ) from None


def _array(path, npz, name):
    """An array of an npz file, mapped where the file holds it as it is: processes that read it share one copy."""
    entry = npz.zip.getinfo(f"{name}.npy")
    with npz.zip.open(entry) as stream:
        if entry.compress_type != zipfile.ZIP_STORED or np.lib.format.read_magic(stream) != (1, 0):
            return np.asarray(npz[name])
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        if dtype.hasobject or 0 in shape:
            return np.asarray(npz[name])  # which refuses objects
        offset = stream.tell()
        while stream.read(1 << 20):  # to the end, where zipfile compares the checksum
            pass
    with open(path, "rb") as file:
        file.seek(
            entry.header_offset + 26
        )  # of the entry's own header: the lengths of its name and extra field, then these two
        offset += entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    return np.memmap(path, dtype, "c", offset, shape, "F" if fortran_order else "C")


def _check_arrays(path, arrays, num_classes=None):
    """(classes, training split, test split), checked. Without ``num_classes``, the names or else the largest label tell it."""
    names = arrays.get("classes")
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U" or num_classes not in (None, len(names))):
        raise UserError(
            f"{path}: 'classes' is {_form(names)}; it must hold the names of {num_classes or 'the'} classes, or be left out"
        )
    splits = [_check_split(path, part, arrays) for part in ("train", "test")]
    train_side, test_side = (split.images.shape[1] for split in splits)
    if train_side != test_side:
        raise UserError(
            f"{path}: 'train_x' has images of side {train_side}, 'test_x' of {test_side}; resize them to one"
        )
    if names is None:
        names = range(num_classes or 1 + max(0, *(int(split.targets.max()) for split in splits)))
    for part, split in zip(("train", "test"), splits):
        absence = "has no samples; labels count from 0 without gaps, and each class needs training and test samples"
        _check_targets(f"{path}: '{part}_y'", split.targets, names, absence)
    return tuple(map(str, names)), *splits


def _check_split(path, part, arrays):
    images, labels = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)) or not images.size:
        raise UserError(
            f"{path}: '{part}_x' is {_form(images)}; images must be uint8 (N, H, W, 3), or (N, H, W) for grey"
        )
    if images.shape[1] != images.shape[2]:
        raise UserError(
            f"{path}: '{part}_x' has images of {images.shape[1]}x{images.shape[2]}; make them square, by a crop or by padding"
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: '{part}_y' is {_form(labels)}; labels must be integers (N,), one for each image")
    if len(images) != len(labels):
        raise UserError(
            f"{path}: {len(images)} images in '{part}_x', {len(labels)} labels in '{part}_y'; give one label for each image"
        )
    return Split(images if images.ndim == 4 else _three_channels(images), labels.astype(np.int64))


def _check_targets(place, targets, names, absence):
    """Labels lie in 0..C-1, C the length of ``names``, and each class has a sample; ``absence`` is the complaint about one without."""
    present = np.unique(targets)
    wrong = present[(present < 0) | (present >= len(names))]
    if wrong.size:
        raise UserError(f"{place}: label {wrong[0]} is not in 0..{len(names) - 1}; number the classes from 0")
    if len(present) < len(names):
        first = int(
            np.argmin(np.append(present, -1) == np.arange(len(present) + 1))
        )  # the first class that is not at its place
        raise UserError(f"{place}: class '{names[first]}' {absence}")


def _class_folders(directory):
    try:
        names = {entry.name for entry in os.scandir(directory) if entry.is_dir()}
        if not names:
            raise FileNotFoundError("no class folders in it")
    except OSError as error:
        raise UserError(
            f"{directory}: {_reason(error)}; lay the images out as {directory.parent}/{{train,val}}/<class>/*.jpg"
        ) from None
    return names


def _three_channels(grey):
    """(N, H, W) -> (N, H, W, 3), the channels equal."""
    return np.repeat(grey[..., None], 3, axis=-1)


def _mean_and_std(images, chunk=1 << 22):
    """Mean and (population) standard deviation of each channel, on the 0..1 scale, of uint8 (N, H, W, 3).

    Exact, from the histogram of the 256 values, and counted in chunks of about ``chunk`` pixels. A channel of one value
    gets a standard deviation of 1: it becomes zero.
    """
    step = max(1, chunk // (images.shape[1] * images.shape[2]))
    counts = np.zeros((3, 256), dtype=np.int64)
    for start in range(0, len(images), step):
        counts += [
            np.bincount(images[start : start + step, :, :, channel].ravel(), minlength=256) for channel in range(3)
        ]
    values, share = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = share @ values
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(1))
    std[(counts > 0).sum(1) == 1] = 1
    return tuple(mean.tolist()), tuple(std.tolist())


def _form(array):
    return f"{array.dtype} of shape {array.shape}"


def _reason(error):
    """An error's own words, on one line."""
    return " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
