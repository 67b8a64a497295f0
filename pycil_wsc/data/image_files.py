"""Data sets of image files: ``PATH/{train,val}/<class>/*.jpg``."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from pycil_wsc.data.npz import check_names, check_targets, reason
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
IMAGE_FILES: dict[str, Any] = {  # DatasetInfo of image files, without the names
    **IMAGENET,
    **{"image_size": 224, "crop": "resized", "padding": 0, "flip": True, "brightness": 0.0},
}


def read_folder(name: str, path: Path) -> Dataset:
    """Read ``train`` and ``val`` (or ``test`` if there is no ``val``), each with one folder per class.

    The layout is that of torchvision's ``ImageFolder``. A class is named after its folder; bytes that are not UTF-8
    are replaced by U+FFFD.
    """
    parts = _parts(path)
    layout = f"{path}/{{train,val}}/<class>/*.jpg"
    folders = sorted(set().union(*(_class_folders(part, layout) for part in parts)))
    classes = _names(path, folders)
    splits = [_split(part, folders) for part in parts]
    problem = f"has no image files ({' '.join(IMG_EXTENSIONS)}); add some, or remove the class's folder from both parts"
    for part, split in zip(parts, splits):
        check_targets(str(part), split.targets, classes, problem)
    train, test = splits
    return Dataset(DatasetInfo(name, classes, **IMAGE_FILES), train, test)


def common_folder(paths: Iterable[str]) -> str:
    """``os.path.commonpath``, quickly for many files in few folders; absolute if any of the paths is."""
    paths = set(paths)
    folders = set(map(os.path.dirname, paths)) if len(paths) > 1 else paths
    if len(set(map(os.path.isabs, folders))) > 1:
        folders = set(map(os.path.abspath, folders))
    return os.path.commonpath(folders)


def read_task_folder(name: str, path: Path) -> Dataset:
    """Read one task's images: ``path/<class>/*.jpg``, or training and test parts as in :func:`read_folder`.

    Without parts, the test split is empty. A class without images is left out.
    """
    parts = _parts(path)
    if not all(map(os.path.isdir, parts)):
        parts = (path,)
    folders = sorted(set().union(*(_class_folders(part, f"{path}/<class>/*.jpg") for part in parts)))
    train, *others = (_split(part, folders) for part in parts)
    if not len(train):
        raise UserError(f"{parts[0]}: no image files ({' '.join(IMG_EXTENSIONS)}) in its class folders; add some")
    test = others[0] if others else Split(train.images[:0], train.targets[:0])
    return Dataset(DatasetInfo(name, _names(path, folders), **IMAGE_FILES), train, test)


def _parts(path: Path) -> tuple[Path, ...]:
    return path / "train", path / (
        "test" if os.path.isdir(path / "test") and not os.path.isdir(path / "val") else "val"
    )


def _names(path: Path, folders: list[str]) -> tuple[str, ...]:
    """The class names; different folders may have the same one, after bytes that are not UTF-8 were replaced."""
    names = tuple(os.fsencode(folder).decode(errors="replace") for folder in folders)
    check_names(str(path), names)
    return names


def _split(part: Path, folders: list[str]) -> Split:
    """The image files below ``part``; class k is in ``folders[k]``."""
    files = make_dataset(part, {folder: k for k, folder in enumerate(folders)}, IMG_EXTENSIONS, allow_empty=True)
    return Split(np.array([file for file, _ in files], dtype=str), np.array([k for _, k in files], dtype=np.int64))


def _class_folders(directory: Path, layout: str) -> set[str]:
    try:
        names = {entry.name for entry in os.scandir(directory) if entry.is_dir()}
        if not names:
            raise FileNotFoundError("contains no class folders")
    except OSError as error:
        raise UserError(f"{directory}: {reason(error)}; arrange the images as {layout}") from None
    return names


def image_status(path: str) -> os.stat_result:
    """``os.stat`` of an image file. Raises a :class:`UserError` that names it if it does not exist."""
    try:
        return os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; replace the image, or remove it") from None


def decode(path: str) -> Image.Image:
    """Decode an image file as RGB."""
    try:
        with Image.open(path) as image:
            if not image.mode.startswith(("I", "F")):
                return image.convert("RGB")
            problem = f"more than 8 bits per channel (mode {image.mode}); convert it to 8 bits"
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        problem = f"not a readable image ({reason(error)}); replace or remove the file"
    raise UserError(f"{path}: {problem}")
