"""Images to classify, in any form, as chunks of pixels: read as they are needed, so a million need no more memory.

Files are read by threads. Nothing here starts a process, so that it may run in any thread of a server.
"""

from __future__ import annotations

import collections
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.images.datasets import path_of
from pycil_wsc.data.images.image_files import decode, in_colour, middle, open_image, walked
from pycil_wsc.data.images.npz import three_channels
from pycil_wsc.data.images.sources import image_array
from pycil_wsc.data.types import DatasetInfo
from pycil_wsc.errors import UserError

Picture = str | os.PathLike[str] | Image.Image | np.ndarray | torch.Tensor  # one image
Images = np.ndarray | torch.Tensor | Iterable[Picture] | str | os.PathLike[str]
Key = str | int  # identifies an image: its file name, or its position, counted from 0
ONE = "give a PIL image, a file name, or uint8 (H, W, 3), (H, W) or, as a tensor, (3, H, W)"
MANY = "a folder, or a list or generator of file names, PIL images or uint8 (H, W, 3)"


class Chunk(NamedTuple):
    """Some images, in their order.

    ``keys``: what each is called: its file's name, or its number. ``pixels``: uint8 (n, side, side, 3), of those that
    can be read. ``refused``: position among ``keys`` -> why the image cannot be read.
    """

    keys: list[Key]
    pixels: np.ndarray
    refused: dict[int, UserError]


def chunks(images: Images, transform: Transform, size: int, threads: int = 0) -> Iterator[Chunk]:
    """Cut ``images`` into chunks of ``size``.

    Args:
        images: uint8 (B, side, side, 3) or (B, side, side), or as a tensor also (B, 3, side, side); the name of a
            folder, with or without ``"folder:"``, whose image files are read, also those in its folders; or an iterable
            of file names, PIL images and arrays of one image, which may be of any size.
        transform: what is done to an image. Arrays of the side that it crops to are taken as they are.
        size: images per chunk.
        threads: that read and resize images ahead; 0: the caller does.

    Raises:
        UserError: if ``images`` is none of these. An image that cannot be read does not raise it: see :class:`Chunk`.
    """
    if isinstance(images, (str, os.PathLike)):
        return _of_items(_named(_files_of(os.fspath(images), transform)), transform, size, threads)
    if isinstance(images, torch.Tensor) or isinstance(images, np.ndarray) and images.dtype.kind not in "UO":
        return _of_array(image_array(images), transform, size, threads)
    if isinstance(images, Iterable) and not isinstance(images, (bytes, dict)) and getattr(images, "ndim", 1):
        return _of_items(_named(images), transform, size, threads)
    raise UserError(f"images: a {type(images).__name__}; give {_wanted(transform)}, {MANY}")


def _wanted(transform):
    return f"uint8 (B, {transform.crop}, {transform.crop}, 3)"


def _of_array(images: np.ndarray, transform: Transform, size: int, threads: int) -> Iterator[Chunk]:
    """The chunks of one array. Arrays of another size are fitted if the learner was trained on image files."""
    side = transform.crop
    if images.shape == (0,):
        images = np.empty((0, side, side, 3), np.uint8)
    could_be_one = images.shape[2:] == (3,) and side != 3  # image, in colour
    grey = images.dtype == np.uint8 and images.ndim == 3 and not could_be_one
    coloured = three_channels(images) if grey else images
    if coloured.dtype != np.uint8 or coloured.ndim != 4 or coloured.shape[3] != 3:
        raise UserError(_refusal(images, transform))
    if coloured.shape[1:3] == (side, side):
        return _slices(coloured, size)
    if transform.arrays:
        raise UserError(_refusal(images, transform))
    return _of_items(enumerate(coloured), transform, size, threads)


def _refusal(images: np.ndarray, transform: Transform) -> str:
    return f"images: {images.dtype} of shape {images.shape}; this model takes {_wanted(transform)}, or {MANY}"


def _slices(images: np.ndarray, size: int) -> Iterator[Chunk]:
    for start in range(0, len(images), size):
        part = images[start : start + size]
        yield Chunk(list(range(start, start + len(part))), part, {})


# ---- one by one ------------------------------------------------------------------------------------------------------


def _files_of(name: str, transform: Transform) -> Iterator[str]:
    """The image files below a folder, by name; each folder is listed when its turn comes."""
    folder = str(path_of("images", name.removeprefix("folder:")))
    if not os.path.isdir(folder):
        if os.path.isfile(folder):
            raise UserError(f"images: {name!r} is one file; give a list of files: [{name!r}]")
        raise UserError(f"images: {name!r} is not a folder; give {_wanted(transform)}, {MANY}")
    return walked(folder)


def _named(images: Iterable[Picture]) -> Iterator[tuple[Key, Picture]]:
    """(key, image) of each image: files are called by their names, others by their numbers."""
    for number, image in enumerate(images):
        yield (os.fspath(image) if isinstance(image, (str, os.PathLike)) else number), image


def _of_items(items: Iterable[tuple[Key, Picture]], transform: Transform, size: int, threads: int) -> Iterator[Chunk]:
    """The chunks of (key, image)."""
    side = transform.crop
    read = _read_by_threads(items, transform, size, threads) if threads else _read(items, transform)
    while some := list(itertools.islice(read, size)):
        pixels = [fitted for _, fitted in some if not isinstance(fitted, UserError)]
        refused = {place: error for place, (_, error) in enumerate(some) if isinstance(error, UserError)}
        stacked = np.stack(pixels) if pixels else np.empty((0, side, side, 3), np.uint8)
        yield Chunk([key for key, _ in some], stacked, refused)


def _read(items: Iterable[tuple[Key, Picture]], transform: Transform) -> Iterator[tuple[Key, np.ndarray | UserError]]:
    for key, image in items:
        yield key, _pixels(transform.fitted, image)


def _read_by_threads(
    items: Iterable[tuple[Key, Picture]], transform: Transform, size: int, threads: int
) -> Iterator[tuple[Key, np.ndarray | UserError]]:
    """Like :func:`_read`; while a chunk is classified, the next one is read.

    Whole images, unlike names of files, take memory before they are fitted: only some of them wait for a thread.
    """
    ahead: collections.deque[tuple[Key, Future[np.ndarray | UserError]]] = collections.deque()
    room = threading.Semaphore(2 * threads)

    def fit(image: Picture, whole: bool) -> np.ndarray | UserError:
        try:
            return _pixels(transform.fitted, image)
        finally:
            if whole:
                room.release()

    with ThreadPoolExecutor(threads) as pool:
        try:
            for key, image in items:
                whole = not isinstance(image, (str, os.PathLike))
                if whole:
                    room.acquire()
                ahead.append((key, pool.submit(fit, image, whole)))
                if len(ahead) > size:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _pixels(fitted: Callable[[Picture], np.ndarray], image: Picture) -> np.ndarray | UserError:
    """The pixels of an image, or why there are none."""
    try:
        return fitted(image)
    except UserError as error:
        return error


# ---- one image -------------------------------------------------------------------------------------------------------


class Transform:
    """What the learner does to an image before the network sees it, as ``transform`` of a torchvision data set.

    A PIL image of any size, the name of an image file, or a uint8 array or tensor of one image -> float32 (3, side,
    side), normalised, on the CPU. An image is resized to a shorter side of ``resize`` and cropped at its centre to
    ``crop``; after training on arrays, only if it has another size than they. Greyscale becomes three equal channels.

    Raises:
        UserError: if it is not an image, or has more than 8 bits per channel.
    """

    def __init__(self, info: DatasetInfo) -> None:
        self.side, self.interpolation = info.image_size, info.tested_interpolation
        self.mean, self.std = info.mean, info.std
        self.arrays = info.crop == "pad"  # the learner was trained on arrays
        self.crop = (info.stored_size or info.image_size) if self.arrays else info.image_size
        self.resize = self.crop if self.arrays else info.resized_side
        mode = InterpolationMode(self.interpolation)
        self._fit = v2.Compose([v2.Resize(self.resize, mode), v2.CenterCrop(self.crop)])
        self._normalise = augment.Normalise(info.mean, info.std, torch.device("cpu"))

    def __call__(self, image: Picture) -> torch.Tensor:
        pixels = torch.from_numpy(self.fitted(image))[None]
        if self.crop != self.side:  # arrays are stored in another size than the network's
            pixels = augment.resize(pixels, self.side, self.interpolation)
        return self._normalise(pixels)[0]

    def fitted(self, image: Picture) -> np.ndarray:
        """The pixels of an image, resized and cropped: uint8 (crop, crop, 3)."""
        picture = middle(as_picture(image))
        if not self.arrays or picture.size != (self.crop, self.crop):
            picture = self._fit(picture)
        return np.array(picture)

    def settings(self) -> dict[str, object]:
        """The numbers of the transform, as JSON values."""
        values: dict[str, object] = {name: getattr(self, name) for name in ("resize", "crop", "side", "interpolation")}
        return values | {"mean": list(self.mean), "std": list(self.std)}

    def __repr__(self) -> str:
        return f"Transform({', '.join(f'{name}={value}' for name, value in self.settings().items())})"


def as_picture(image: Picture) -> Image.Image:
    """One image in any form that :class:`Transform` takes, as a PIL image in RGB."""
    if isinstance(image, (str, os.PathLike)):
        return decode(os.fspath(image))
    if isinstance(image, Image.Image):
        return in_colour(image)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = image.permute(1, 2, 0).numpy() if _channels_come_first(image.shape) else image.numpy()
    if not isinstance(image, np.ndarray):
        raise UserError(f"image: is a {type(image).__name__}; {ONE}")
    shape = image.shape
    if image.dtype != np.uint8 or not (len(shape) == 2 or len(shape) == 3 and shape[2] in (1, 3)) or 0 in shape:
        raise UserError(f"image: {image.dtype} of shape {shape}; {ONE}")
    return Image.fromarray(image[..., 0] if shape[2:] == (1,) else image).convert("RGB")


def opened(content: bytes) -> Image.Image:
    """The image in the ``content`` of a file. Raises a :class:`UserError` if it is not an image."""
    try:
        return open_image(io.BytesIO(content))
    except Exception:  # what decoders raise about a damaged image
        raise UserError(f"image: {len(content)} bytes that are not an image file's; replace them") from None


def _channels_come_first(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3)
