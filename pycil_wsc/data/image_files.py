"""Images in files: ``PATH/{train,val}/<class>/*.jpg``."""

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from pycil_wsc.data.npz import check_targets, reason
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
IMAGE_FILES: dict[str, Any] = {  # the facts of images in files, but for their names
    **IMAGENET,
    **{"image_size": 224, "crop": "resized", "padding": 0, "flip": True, "brightness": 0.0},
}


def read_folder(name: str, path: Path) -> Dataset:
    """``train`` and ``val`` (or ``test``, where there is no ``val``) with one folder of images a class, as
    torchvision's ``ImageFolder``.

    A class is named as its folder; of a name that is not UTF-8, what cannot be decoded is replaced by U+FFFD.
    """
    parts = _parts(path)
    layout = f"{path}/{{train,val}}/<class>/*.jpg"
    folders = sorted(set().union(*(_class_folders(part, layout) for part in parts)))
    classes = _names(folders)
    splits = [_split(part, folders) for part in parts]
    absence = f"has no image files ({' '.join(IMG_EXTENSIONS)}); add some, or remove the class's folder from both parts"
    for part, split in zip(parts, splits):
        check_targets(str(part), split.targets, classes, absence)
    train, test = splits
    return Dataset(DatasetInfo(name, classes, **IMAGE_FILES), train, test)


def read_task_folder(name: str, path: Path) -> Dataset:
    """One task's images: ``path/<class>/*.jpg``, or in parts as :func:`read_folder` has them, for training and testing.

    Without parts there is nothing to test on. A class without images is left out.
    """
    parts = _parts(path)
    if not all(map(os.path.isdir, parts)):
        parts = (path,)
    folders = sorted(set().union(*(_class_folders(part, f"{path}/<class>/*.jpg") for part in parts)))
    train, *others = (_split(part, folders) for part in parts)
    if not len(train):
        raise UserError(f"{parts[0]}: no image files ({' '.join(IMG_EXTENSIONS)}) in its class folders; add some")
    test = others[0] if others else Split(train.images[:0], train.targets[:0])
    return Dataset(DatasetInfo(name, _names(folders), **IMAGE_FILES), train, test)


def _parts(path: Path) -> tuple[Path, ...]:
    return path / "train", path / (
        "test" if os.path.isdir(path / "test") and not os.path.isdir(path / "val") else "val"
    )


def _names(folders: list[str]) -> tuple[str, ...]:
    return tuple(os.fsencode(folder).decode(errors="replace") for folder in folders)


def _split(part: Path, folders: list[str]) -> Split:
    """The image files below ``part``; class k is in ``folders[k]``."""
    files = make_dataset(part, {folder: k for k, folder in enumerate(folders)}, IMG_EXTENSIONS, allow_empty=True)
    return Split(np.array([file for file, _ in files], dtype=str), np.array([k for _, k in files], dtype=np.int64))


def _class_folders(directory: Path, layout: str) -> set[str]:
    try:
        names = {entry.name for entry in os.scandir(directory) if entry.is_dir()}
        if not names:
            raise FileNotFoundError("no class folders in it")
    except OSError as error:
        raise UserError(f"{directory}: {reason(error)}; lay the images out as {layout}") from None
    return names


def decode(path: str) -> Image.Image:
    """The image in a file, as RGB."""
    try:
        with Image.open(path) as image:
            if not image.mode.startswith(("I", "F")):
                return image.convert("RGB")
            problem = f"more than 8 bits a pixel (mode {image.mode}), which would be cut off at 255; scale it to 8 bits"
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        problem = f"not a readable image ({reason(error)}); replace the file, or remove it"
    raise UserError(f"{path}: {problem}")
