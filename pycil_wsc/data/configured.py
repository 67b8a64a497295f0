"""Applies :class:`DataOptions` to a data set: which of its images, their size, and where they are read from."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from pycil_wsc import registry
from pycil_wsc.data.data_options import AugmentationOptions, DataOptions, MemoryOptions
from pycil_wsc.data.images.datasets import path_of, sized
from pycil_wsc.data.images.image_files import image_status
from pycil_wsc.data.images.map import decoded
from pycil_wsc.data.tasks.domains import in_domains
from pycil_wsc.data.tasks.subset import at_most, long_tailed, only
from pycil_wsc.data.tasks.validation import hold_out
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.keys import declared

D = TypeVar("D", bound=DataOptions)


def configured(dataset: Dataset, options: DataOptions, pretraining: Mapping[str, Json] | None = None) -> Dataset:
    """``dataset`` with the image size, augmentation, classes and part of the images that ``options`` specify.

    ``pretraining``: ``image_size``, ``mean``, ``std`` and ``interpolation`` of a pre-trained model's images, of which
    ``options`` may give another size.
    """
    changes = _augmentation(dataset, options)
    size = options.image_size
    if pretraining and not dataset.info.own_transforms:
        size = size or pretraining["image_size"]
        changes = {name: pretraining[name] for name in ("mean", "std", "interpolation")} | changes
    if size:
        dataset = sized(dataset, size)
    dataset = dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, **changes))
    if options.classes:
        dataset = only(dataset, options.classes)
    if options.validation_split:
        dataset = hold_out(dataset, options.validation_split, options.seed, one_task=bool(options.tasks))
    if options.images_per_class is not None:
        dataset = at_most(dataset, options.images_per_class, options.seed)
    if options.imbalance is not None:
        dataset = long_tailed(dataset, options.imbalance, options.seed)
    if options.domains:
        dataset = in_domains(dataset, options.domains, options.seed)
    return dataset


def _augmentation(dataset: Dataset, options: DataOptions) -> dict[str, Json]:
    """The keys of the augmentation that are given. Raises a :class:`UserError` for one without effect."""
    given = {name: getattr(options, name) for name in declared(AugmentationOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    resized = dataset.info.crop == "resized"
    unused = [name for name in (("padding", "brightness") if resized else ("crop_scale", "crop_pct")) if name in given]
    if not unused:
        return given
    if not resized:
        raise UserError(f"{unused[0]}: has no effect on arrays, which get padded crops; leave the key out")
    images = "this data set's images" if dataset.train.in_memory else "image files"
    raise UserError(f"{unused[0]}: has no effect on {images}, which get random resized crops; leave the key out")


def for_training(dataset: Dataset, options: DataOptions) -> Dataset:
    """``dataset`` with its image files decoded once, if ``cache_images`` says so."""
    if not options.cache_images:
        return dataset
    root = path_of("data_root", options.data_root)
    return decoded(dataset, root, options.num_workers, options.cache_images == "device")


def known_images(dataset: Dataset) -> np.ndarray:
    """The training images by which a run counts ``memory_bytes``: all, or with ``tasks`` those of the first one.

    Then a longer list of tasks does not change the size of the memory.
    """
    images, tasks = dataset.train.images, dataset.arrivals
    return images if tasks is None or dataset.train.in_memory else images[tasks.train == 0]


def with_memory_size(options: D, images: np.ndarray) -> D:
    """``options`` with the ``memory_size`` that follows from ``memory_bytes``, if that is given.

    ``images``: uint8 (N, side, side, 3), or (N,) paths, of which each counts as much as their mean size.
    """
    if options.memory_bytes is None:
        return options
    size = bytes_of(images[:1]) if images.dtype == np.uint8 else bytes_of(images) / len(images)
    if 0 < options.memory_bytes < size:
        raise UserError(
            f"memory_bytes: {options.memory_bytes} bytes are less than an image takes ({math.ceil(size)}); give a "
            "larger number, or 0 to keep none"
        )
    return dataclasses.replace(options, memory_size=int(options.memory_bytes // size))


def bytes_of(images: np.ndarray) -> int:
    """The bytes of ``images`` as they are stored: of the pixels, uint8 (N, H, W, 3), or of the files, (N,) paths."""
    if images.dtype == np.uint8:
        return images.nbytes
    return sum(image_status(path).st_size for path in images.tolist())


def check_divided_memory(
    options: MemoryOptions, classes: int, which: str, remedy: str, size: int | None = None
) -> None:
    """Raise a :class:`UserError` if a memory that is divided among ``classes`` holds fewer than one exemplar of each.

    ``which``: these classes in words; ``remedy``: what to do, with ``{key}`` for the key that sets the size; ``size``:
    the number of exemplars, if it is not ``memory_size``.
    """
    size = options.memory_size if size is None else size
    divided = not options.fixed_memory and registry.exemplars[options.exemplars].by_class
    if divided and size < classes:
        key = "memory_size" if options.memory_bytes is None else "memory_bytes"
        raise UserError(
            f"{key}: the memory holds {size} exemplars, fewer than one for each of {which}; {remedy.format(key=key)}"
        )
