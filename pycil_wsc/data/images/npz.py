"""The user's own arrays, from a file made by ``np.savez``.

=======================  =============================================================================
``train_x``, ``test_x``  images, uint8 (N, H, W, 3) with H = W, or (N, H, W) if greyscale
``train_y``, ``test_y``  labels, integers (N,) numbered from 0 without gaps
``classes``              optional class names, different strings (C,) in label order; by default a class is named
                         by its label
=======================  =============================================================================

Each class needs a training and a test sample. The arrays are read into memory rather than mapped: ``np.savez`` to the
same file truncates it first, and a process that then accesses a mapped page is killed by SIGBUS without a message. Once
read, the file may change at any time without affecting the run. Each training process therefore holds its own copy; a
process that only plans runs frees it.
"""

import os
import sys
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pycil_wsc.allocator import free_host_memory
from pycil_wsc.data.types import DatasetInfo, Split, normal
from pycil_wsc.errors import UserError
from pycil_wsc.files import opened, working_folder

ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def read_npz(path: Path) -> tuple[dict[str, np.ndarray], os.stat_result]:
    """Read the arrays of an npz file by name (``ARRAYS`` and, if present, ``classes``), and the file's status.

    Verifies the checksum of each array. Raises a :class:`UserError` if the file does not exist, is incomplete or has
    other contents.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            missing = [name for name in ARRAYS if name not in names]
            if missing:
                raise UserError(
                    f"{path}: no array '{missing[0]}', only {names}; save {', '.join(ARRAYS)} with np.savez"
                )
            wanted = [name for name in (*ARRAYS, "classes") if name in names]
            _check_size(path, sum(archive.getinfo(f"{name}.npy").file_size for name in wanted))
            arrays = {name: _array(archive, f"{name}.npy") for name in wanted}
            return arrays, os.fstat(file.fileno())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file (relative paths start at {working_folder()}); create it with np.savez of "
            f"{', '.join(ARRAYS)}"
        ) from None
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); make it readable") from None
    except MemoryError as error:
        raise UserError(
            f"{path}: does not fit in memory ({reason(error)}); use image files and 'folder:PATH'"
        ) from None
    except UserError:
        raise
    except Exception as error:  # from zipfile, zlib or numpy's header parser
        raise UserError(
            f"{path}: not a complete npz file of plain arrays ({reason(error)}); create it again with np.savez, "
            "or copy it again"
        ) from None


def _check_size(path: Path, size: int) -> None:
    """Raise a :class:`UserError` if the arrays, which may be compressed, take more than the free memory."""
    free = free_host_memory()
    if size > free:
        raise UserError(
            f"{path}: does not fit in memory ({size / 1e9:,.1f} GB of arrays, and {free / 1e9:,.1f} GB are free); "
            "use image files and 'folder:PATH'"
        )


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        # zipfile verifies the checksum at the end of the entry, and np.load stops before it
        if stream.read(1):
            raise ValueError(f"{name}: bytes after the array")
        return array


def check_arrays(
    path: Path | str, arrays: Mapping[str, np.ndarray], num_classes: int | None = None
) -> tuple[tuple[str, ...], Split, Split]:
    """Check the arrays and return (classes, training split, test split). ``path`` begins the error messages.

    Without ``num_classes``, the number of classes is that of the names or, without names, follows from the largest
    label.
    """
    names = arrays.get("classes")
    if names is not None and (
        names.ndim != 1 or not len(names) or names.dtype.kind != "U" or num_classes not in (None, len(names))
    ):
        raise UserError(
            f"{path}: 'classes' is {_form(names)}; it must hold the names of {num_classes or 'the'} classes, "
            "or be omitted"
        )
    if names is not None:
        check_names(f"{path}: 'classes'", names.tolist())
    train, test = (_check_split(path, part, arrays) for part in ("train", "test"))
    train_side, test_side = train.images.shape[1], test.images.shape[1]
    if train_side != test_side:
        raise UserError(
            f"{path}: 'train_x' has images of side {train_side}, 'test_x' of {test_side}; resize them to one size"
        )
    if names is None:
        largest = max(0, *(int(split.targets.max()) for split in (train, test)))
        names = range(num_classes or min(largest + 1, sys.maxsize))
    for part, split in (("train", train), ("test", test)):
        problem = "has no samples; number labels from 0 without gaps, with training and test samples for each class"
        check_targets(f"{path}: '{part}_y'", split.targets, names, problem)
    return tuple(map(str, names)), train, test


def _check_split(path, part, arrays):
    images, labels = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)) or not images.size:
        raise UserError(
            f"{path}: '{part}_x' is {_form(images)}; images must be uint8 (N, H, W, 3), or (N, H, W) if greyscale"
        )
    if images.shape[1] != images.shape[2]:
        raise UserError(
            f"{path}: '{part}_x' has images of {images.shape[1]}x{images.shape[2]}; make them square by cropping or "
            "padding"
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: '{part}_y' is {_form(labels)}; labels must be integers (N,), one per image")
    if len(images) != len(labels):
        raise UserError(
            f"{path}: {len(images)} images in '{part}_x', but {len(labels)} labels in '{part}_y'; give one label per "
            "image"
        )
    return Split(images if images.ndim == 4 else three_channels(images), labels.astype(np.int64))


def info_of_arrays(name: str, classes: tuple[str, ...], images: np.ndarray) -> DatasetInfo:
    """The :class:`DatasetInfo` of uint8 (N, side, side, 3), with a generic augmentation: pad by side / 8, random crop,
    flip.
    """
    side = images.shape[1]
    mean, std = mean_and_std(images)
    return DatasetInfo(name, classes, side, mean, std, crop="pad", padding=side // 8, flip=True, brightness=0.0)


def check_targets(place: str, targets: np.ndarray, names: Sequence[object] | np.ndarray, problem: str) -> None:
    """Raise a :class:`UserError` unless labels are in 0..C-1, with C ``names``, and every class has a sample.

    ``place`` begins the message; ``problem`` ends it if a class has no sample.
    """
    present = np.unique(targets)
    wrong = present[(present < 0) | (present >= len(names))]
    if wrong.size:
        raise UserError(f"{place}: label {wrong[0]} is not in 0..{len(names) - 1}; number the classes from 0")
    if len(present) < len(names):
        first = int(np.argmin(np.append(present, -1) == np.arange(len(present) + 1)))  # the first missing label
        raise UserError(f"{place}: class '{names[first]}' {problem}")


def check_names(place: str, names: Sequence[str]) -> None:
    """Raise a :class:`UserError`, which begins with ``place``, if two classes have the same name, or one none that can
    be read (:func:`problem_of_name`).

    Classes are identified by their names where tasks are joined (:mod:`pycil_wsc.data.tasks.growing_dataset`).
    """
    for name in names:
        if problem := problem_of_name(name):
            raise UserError(f"{place}: class name {problem}")
    name, number = Counter(map(normal, names)).most_common(1)[0] if names else ("", 0)
    if number > 1:
        raise UserError(f"{place}: class name '{name}' is given twice; give each class its own name")


def problem_of_name(name: str) -> str:
    """Why a class cannot be called ``name``, which nobody could tell from others: it is blank, or has a line break or
    another control character; "" if it can."""
    if not name.strip():
        return f"{name!r} is blank; give the class a name"
    if "\0" in name:
        return f"{name!r} has a zero byte, which NumPy may cut off; leave it out"
    if any(unicodedata.category(letter) == "Cc" for letter in name):
        return f"{name!r} has a control character; leave it out"
    return ""


def three_channels(grey: np.ndarray) -> np.ndarray:
    """(N, H, W) -> (N, H, W, 3) with equal channels."""
    return np.repeat(grey[..., None], 3, axis=-1)


def mean_and_std(images: np.ndarray, chunk: int = 1 << 22) -> tuple[tuple, tuple]:
    """Mean and population standard deviation of each channel of uint8 (N, H, W, 3), on the 0..1 scale.

    Exact: computed from a histogram of the 256 values, counted in chunks of about ``chunk`` pixels. A constant channel
    gets a standard deviation of 1, so it is normalised to zero.
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


def reason(error: BaseException) -> str:
    """The message of an error, on one line."""
    return " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
