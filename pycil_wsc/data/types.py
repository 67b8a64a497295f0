"""A data set in frozen records: its facts, its splits, and both together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pycil_wsc.data.image_map import ImageMap


@dataclass(frozen=True)
class DatasetInfo:
    """The facts of a data set. ``image_size`` is the side of the square images after the transforms; arrays whose side
    is another have that as ``stored_size``, and are resized last, by ``interpolation``. ``augmentation`` is "pycil",
    or "timm" (:mod:`pycil_wsc.data.rand_augment`) in place of ``padding`` and ``brightness``.

    ``crop`` is "pad" (zero-pad by ``padding``, random crop; test images as they are) or "resized"
    (``RandomResizedCrop``; test images with the short side resized to ``round(image_size * 256 / 224)``, then the
    centre). ``mean`` and ``std`` are on the 0..1 scale. ``brightness`` is ``ColorJitter``'s: a factor uniform in 1 +-
    brightness.
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

    @property
    def num_classes(self) -> int:
        return len(self.classes)


@dataclass(frozen=True, eq=False)
class Split:
    """``images``: uint8 (N, H, W, 3), or N paths as an array of str; ``targets``: int64 (N,).

    ``decoded``: the images of the paths, already decoded, and whether they are to be held ``on_device``.
    """

    images: np.ndarray
    targets: np.ndarray
    decoded: "ImageMap | None" = None
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        return self.images.dtype == np.uint8


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The tasks of a stream. ``seen``: the number of classes known after each of them. ``train`` and ``test``: int64
    (N,), the task with which each sample of the split arrives, counted from 0.
    """

    seen: tuple[int, ...]
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True, eq=False)
class Dataset:
    """``held_out``: the share of the training samples that stand in the test split's place
    (:mod:`pycil_wsc.data.validation`), or 0. ``fingerprint``: which data these are (:mod:`pycil_wsc.data.fingerprint`),
    set by ``load_dataset``; it stays that of the whole data set when samples are held out or image files resized.
    ``arrivals``: of a stream of tasks (:mod:`pycil_wsc.data.stream`); None where the classes are split into tasks.
    """

    info: DatasetInfo
    train: Split
    test: Split
    held_out: float = 0.0
    fingerprint: dict | None = None
    arrivals: Arrivals | None = None
