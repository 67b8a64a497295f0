"""Images in files: ``PATH/{train,val}/<class>/*.jpg``."""

import os
import zlib
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from pycil_wsc.data.npz import check_targets, reason
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def read_folder(name: str, path: Path) -> Dataset:
    """``train`` and ``val`` (or ``test``, where there is no ``val``) with one folder of images a class, as
    torchvision's ``ImageFolder``.

    A class is named as its folder; of a name that is not UTF-8, what cannot be decoded is replaced by U+FFFD.
    """
    train = path / "train"
    test = path / ("test" if os.path.isdir(path / "test") and not os.path.isdir(path / "val") else "val")
    folders = sorted(_class_folders(train) | _class_folders(test))
    classes = tuple(os.fsencode(folder).decode(errors="replace") for folder in folders)
    splits = []
    for part in (train, test):
        files = make_dataset(part, {folder: k for k, folder in enumerate(folders)}, IMG_EXTENSIONS, allow_empty=True)
        targets = np.array([target for _, target in files], dtype=np.int64)
        absence = (
            f"has no image files ({' '.join(IMG_EXTENSIONS)}); add some, or remove the class's folder from both parts"
        )
        check_targets(str(part), targets, classes, absence)
        splits.append(Split(np.array([file for file, _ in files]), targets))
    info = DatasetInfo(name, classes, 224, **IMAGENET, crop="resized", padding=0, flip=True, brightness=0.0)
    return Dataset(info, *splits)


def _class_folders(directory):
    try:
        names = {entry.name for entry in os.scandir(directory) if entry.is_dir()}
        if not names:
            raise FileNotFoundError("no class folders in it")
    except OSError as error:
        layout = f"{directory.parent}/{{train,val}}/<class>/*.jpg"
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
