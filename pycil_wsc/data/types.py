"""Frozen dataclasses that describe a data set."""

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pycil_wsc.errors import UserError
from pycil_wsc.files import opened

Fingerprint = dict[str, Any]  # of a data set: its numbers of samples, its hash and, for a stream, those of its tasks


def normal(name: str) -> str:
    """A class name in the Unicode form NFC: classes are identified by name, and macOS gives folders' names in NFD."""
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class DatasetInfo:
    """The classes of a data set, and how its images are transformed.

    Args:
        name: the data set's name.
        classes: class names in label order; converted by :func:`normal`.
        image_size: side of the square images after the transforms.
        mean: of each channel, on the 0..1 scale.
        std: of each channel, on the same scale.
        crop: "pad" (zero-pad by ``padding``, random crop; test images unchanged) or "resized" (``RandomResizedCrop``;
            test images are resized to a short side of ``resized_side`` and cropped at the centre).
        padding: width of the zero padding.
        flip: flip training images horizontally at random.
        brightness: as in ``ColorJitter``: factors are uniform in 1 +- brightness.
        stored_size: side of arrays that are not stored at ``image_size``; they are resized after augmentation.
        interpolation: how images are resized, in training at least.
        augmentation: "pycil"; "autoaugment" (:mod:`.batches.augmentation.auto_augment`), which adds to it; or "timm"
            (:mod:`.batches.augmentation.rand_augment`), which replaces ``padding`` and ``brightness``.
        crop_scale: the smallest area of a random resized crop, as a fraction of the image's.
        crop_pct: the side of the centre crop as a fraction of the short side of the resized test image.
        test_interpolation: how test images are resized; None: as others.
        own_transforms: size, normalisation and interpolation are the data set's own, whatever a pre-trained model's
            are.
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
    stored_size: int | None = None
    interpolation: str = "bilinear"
    augmentation: str = "pycil"
    crop_scale: float = 0.08
    crop_pct: float = 0.875  # 224 of 256 pixels
    test_interpolation: str | None = None
    own_transforms: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(map(normal, self.classes)))

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def resized_side(self) -> int:
        """The short side to which a test image is resized before the crop of ``image_size``."""
        return round(self.image_size / self.crop_pct)

    @property
    def tested_interpolation(self) -> str:
        """How test images are resized."""
        return self.test_interpolation or self.interpolation


@dataclass(frozen=True, eq=False)
class ImageMap:
    """Decoded images in the file ``path``.

    ``starts``: int64 (N,), the first pixel of each image; ``sizes``: int64 (N, 2), height and width; ``written``: the
    time of the file that they describe, in ns. Raises :class:`UserError` if the file was replaced before it is mapped.
    """

    path: Path
    starts: np.ndarray
    sizes: np.ndarray
    written: int

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, rows: np.ndarray) -> "ImageMap":
        """The images of these rows, in this order."""
        return replace(self, starts=self.starts[rows], sizes=self.sizes[rows])

    def image(self, number: int) -> np.ndarray:
        """A view of one image."""
        height, width = self.sizes[number]
        start = self.starts[number]
        return self.pixels[start : start + height * width].reshape(height, width, 3)

    @cached_property
    def pixels(self) -> np.ndarray:
        """The pixels of all images: uint8 (pixels, 3), mapped from the file copy-on-write."""
        with opened(self.path) as file:
            if os.fstat(file.fileno()).st_mtime_ns != self.written:
                raise UserError(f"{self.path}: another command has decoded the images again; start this one again")
            return np.memmap(file, np.uint8, "c").reshape(-1, 3)

    def __getstate__(self) -> dict[str, object]:  # each loader process maps the file itself
        return {name: value for name, value in vars(self).items() if name != "pixels"}


@dataclass(frozen=True, eq=False)
class Split:
    """``images``: uint8 (N, H, W, 3), or N paths as an array of str; ``targets``: int64 (N,).

    ``decoded``: the images of the paths, if they are decoded already; ``on_device``: hold these on the device.
    """

    images: np.ndarray
    targets: np.ndarray
    decoded: ImageMap | None = None
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        return self.images.dtype == np.uint8


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The tasks of a stream.

    ``seen``: the number of classes known after each task. ``train`` and ``test``: int64 (N,), the task of each sample
    of the split, counted from 0. ``relearned``: int64 (k, 2), the training samples of the last task that an earlier one
    has learned with another class, and that class; a sample may have several.
    """

    seen: tuple[int, ...]
    train: np.ndarray
    test: np.ndarray
    relearned: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with its training and test splits.

    ``validation_share``: the fraction of training samples used as test split (:mod:`.tasks.validation`), or 0.
    ``fingerprint``: identifies the data (:mod:`.images.fingerprint`); set by ``load_dataset``, and still that of
    the whole data set after samples are held out or image files resized. ``arrivals``: the tasks of a stream
    (:mod:`.tasks.stream`); None if the classes are split into tasks. ``left_out``: suffix -> number of files in the
    folders of image files that are not read as images.
    """

    info: DatasetInfo
    train: Split
    test: Split
    validation_share: float = 0.0
    fingerprint: Fingerprint | None = None
    arrivals: Arrivals | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
