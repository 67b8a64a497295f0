"""Image files decoded once into one file of bytes, which all processes of a machine map into memory.

Each image is uint8 with the short side of the test transform, one after another; an index says where each begins. The
index is written last, and names the files by path, size and time: without it, or with another, nothing is taken over.
"""

import hashlib
import io
import logging
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm

from pycil_wsc.data.image_files import decode
from pycil_wsc.data.resized import places
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked, write_atomically

CHUNK = 64  # images that a process decodes at a time


@dataclass(frozen=True, eq=False)
class ImageMap:
    """Images in the file ``path``, whose ``pixels`` are uint8 (all pixels, 3).

    ``starts``: int64 (N,), the first pixel of each image; ``sizes``: int64 (N, 2), height and width.
    """

    path: Path
    starts: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, rows: np.ndarray) -> "ImageMap":
        """Some of the images, in this order."""
        return ImageMap(self.path, self.starts[rows], self.sizes[rows])

    def image(self, number: int) -> np.ndarray:
        """A view of one image."""
        height, width = self.sizes[number]
        start = self.starts[number]
        return self.pixels[start : start + height * width].reshape(height, width, 3)

    @cached_property
    def pixels(self) -> np.ndarray:
        """All of them: uint8 (pixels, 3), mapped from the file, which nothing changes."""
        return np.memmap(self.path, np.uint8, "c").reshape(-1, 3)

    def __getstate__(self) -> dict[str, Any]:  # a process that decodes maps the file itself
        return {name: value for name, value in vars(self).items() if name != "pixels"}


def decoded(dataset: Dataset, root: str | Path, workers: int, on_device: bool) -> Dataset:
    """``dataset`` with its image files decoded once below ``root``; arrays in memory stay as they are.

    ``on_device``: they are to be held on the device that trains, where they fit. :class:`UserError` for a file that
    cannot be read, and where the disk is too small.
    """
    if dataset.train.in_memory:
        return dataset
    side = round(dataset.info.image_size * 256 / 224)
    paths = np.unique(np.concatenate([dataset.train.images, dataset.test.images]))
    images = image_map(paths, places(dataset, root, side)[1], side, dataset.info.interpolation, workers)
    splits = {
        part: replace(split, decoded=images.of(np.searchsorted(paths, split.images)), on_device=on_device)
        for part, split in (("train", dataset.train), ("test", dataset.test))
    }
    return replace(dataset, **splits)


def image_map(paths: np.ndarray, folder: Path, side: int, interpolation: str, workers: int) -> ImageMap:
    """The images of ``paths`` with a short side of ``side``, from ``folder``; decoded by ``workers`` if need be.

    :class:`UserError` for a file that cannot be read, or if the disk has too little space.
    """
    key, listed = _key(paths, side, interpolation), hashlib.sha256(os.fsencode("\n".join(paths)))
    name = f"decoded-{listed.hexdigest()[:8]}"
    path, index = folder / f"{name}.uint8", folder / f"{name}.npz"
    with locked(folder):
        if (known := _read(index, key)) is None:
            index.unlink(missing_ok=True)  # what stands beside it will not be what it says
            sizes = _sizes(paths, side, workers)
            known = np.concatenate([[0], np.cumsum(sizes.prod(1))]), sizes
            _write(paths, path, *known, v2.Resize(side, v2.InterpolationMode(interpolation)), workers)
            _write_index(index, key, *known)
    starts, sizes = known
    return ImageMap(path, starts[:-1], sizes)


def _key(paths, side, interpolation):
    """A digest of the files: their paths, sizes and times."""
    digest = hashlib.sha256(f"{side} {interpolation}".encode())
    for path in paths.tolist():
        status = os.stat(path)
        digest.update(b"%s\0%d %d\0" % (os.fsencode(path), status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def _read(index, key):
    """(starts, sizes) of an index with this key."""
    try:
        with np.load(index) as known:
            return (known["starts"], known["sizes"]) if str(known["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _write_index(index, key, starts, sizes):
    buffer = io.BytesIO()
    np.savez(buffer, key=key, starts=starts, sizes=sizes)
    write_atomically(index, buffer.getvalue())


def _sizes(paths, side, workers):
    """Height and width that each image will have: int64 (N, 2)."""
    parts = _in_processes(partial(_sizes_of, side=side), paths, workers, "reading sizes of images")
    return np.array([size for part in parts for size in part], np.int64).reshape(-1, 2)


def _write(paths, path, starts, sizes, resize, workers):
    """Decode all images into ``path``."""
    total, free = 3 * int(starts[-1]), shutil.disk_usage(path.parent).free
    if total > free:
        raise UserError(
            f"cache_images: {len(paths):,} decoded images take {total / 1e9:.1f} GB, and {path.parent} has "
            f"{free / 1e9:.1f} GB; free space, choose another folder with --data-root, or use true (JPEG copies)"
        )
    logging.getLogger("pycil_wsc").warning("%s: decoding %d images, %.1f GB", path, len(paths), total / 1e9)
    partial_file = path.with_name(f".{path.name}.partial")
    with open(partial_file, "wb") as file:
        file.truncate(total)
    numbered = np.array(list(zip(paths.tolist(), starts[:-1].tolist())), dtype=object)
    for _ in _in_processes(
        partial(_decode_into, file=partial_file, resize=resize), numbered, workers, "decoding images"
    ):
        pass
    os.replace(partial_file, path)


def _in_processes(work, items, workers, what):
    """``work(part)`` for each ``CHUNK`` of ``items``, in their order, in ``workers`` processes, or here if that is 0.

    A :class:`UserError` of a process is raised.
    """
    parts = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    if not workers:
        yield from map(work, parts)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        try:
            yield from tqdm(pool.map(work, parts), desc=what, total=len(parts), leave=False)
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise


def _sizes_of(paths, side):
    return [_resized_size(width, height, side) for width, height in map(_size, paths)]


def _size(path):
    """Width and height of an image file; all of it is read only where the header cannot be."""
    try:
        with Image.open(path) as image:
            return image.size
    except Exception:
        return decode(path).size


def _resized_size(width, height, side):
    """(height, width) as torchvision's ``Resize`` gives an image."""
    short, long = sorted((width, height))
    other = int(side * long / short)
    return (side, other) if height <= width else (other, side)


def _decode_into(numbered, file, resize):
    with open(file, "r+b") as output:
        for path, start in numbered:
            output.seek(3 * start)
            output.write(np.asarray(resize(decode(path))).tobytes())
