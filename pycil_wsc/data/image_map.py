"""Decodes image files once into a single file, which all processes of a machine map into memory.

The file holds the images as uint8, concatenated, resized to the short side of the test transform. An index stores
where each image begins, and a hash of the image files' paths, sizes and times. It is written last: if it is missing or
damaged, the hash differs, or the file of images has another size, the images are decoded again.
"""

import hashlib
import io
import logging
import os
import shutil
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import v2

from pycil_wsc.data.image_files import decode, image_status
from pycil_wsc.data.parallel import map_parts, process_pool
from pycil_wsc.data.resized import cache_folder
from pycil_wsc.data.types import Dataset, ImageMap
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked, write_atomically


def decoded(dataset: Dataset, root: str | Path, workers: int, on_device: bool) -> Dataset:
    """``dataset`` with its image files decoded once, in a folder below ``root``; arrays in memory are left unchanged.

    ``on_device``: hold the images on the training device if they fit. Raises a :class:`UserError` if a file cannot be
    read or the disk has too little space.
    """
    if dataset.train.in_memory:
        return dataset
    side = round(dataset.info.image_size * 256 / 224)
    paths = np.unique(np.concatenate([dataset.train.images, dataset.test.images]))
    images = image_map(paths, cache_folder(dataset, root, side)[1], side, dataset.info.interpolation, workers)
    splits = {
        part: replace(split, decoded=images.of(np.searchsorted(paths, split.images)), on_device=on_device)
        for part, split in (("train", dataset.train), ("test", dataset.test))
    }
    return replace(dataset, **splits)


def image_map(paths: np.ndarray, folder: Path, side: int, interpolation: str, workers: int) -> ImageMap:
    """The images of ``paths``, resized to a short side of ``side``, cached in ``folder``.

    Images that are not cached yet are decoded by ``workers`` processes. Raises a :class:`UserError` if a file cannot be
    read or the disk has too little space.
    """
    key, listed = _key(paths, side, interpolation), hashlib.sha256(os.fsencode("\n".join(paths)))
    name = f"decoded-{listed.hexdigest()[:8]}"
    path, index = folder / f"{name}.uint8", folder / f"{name}.npz"
    with locked(folder):
        known = _read(index, path, key)
        if known is None:
            if folders := [file for file in (path, index) if file.is_dir()]:
                raise UserError(f"cache_images: {folders[0]} is a folder, where a file is to be written; move it away")
            index.unlink(missing_ok=True)  # it will no longer match the file of images
            with process_pool(workers, len(paths)) as pool:
                sizes = _sizes(paths, side, pool)
                known = np.concatenate([[0], np.cumsum(sizes.prod(1))]), sizes
                _write(paths, path, known[0], v2.Resize(side, v2.InterpolationMode(interpolation)), pool)
            _write_index(index, key, *known)
    starts, sizes = known
    return ImageMap(path, starts[:-1], sizes)


def _key(paths, side, interpolation):
    """A digest of the files: their paths, sizes and times."""
    digest = hashlib.sha256(f"{side} {interpolation}".encode())
    for path in paths.tolist():
        status = image_status(path)
        digest.update(b"%s\0%d %d\0" % (os.fsencode(path), status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def _read(index, path, key):
    """(starts, sizes) from the index; None if it is missing, damaged or has another key, or ``path`` is not whole."""
    try:
        with np.load(index) as known:
            starts, sizes, same = known["starts"], known["sizes"], str(known["key"]) == key
        return (starts, sizes) if same and path.stat().st_size == 3 * starts[-1] else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write_index(index, key, starts, sizes):
    buffer = io.BytesIO()
    np.savez(buffer, key=key, starts=starts, sizes=sizes)
    write_atomically(index, buffer.getvalue())


def _sizes(paths, side, pool):
    """Height and width of each image after resizing: int64 (N, 2)."""
    parts = map_parts(partial(_sizes_of, side=side), paths, pool, "reading sizes of images")
    return np.array([size for part in parts for size in part], np.int64).reshape(-1, 2)


def _write(paths, path, starts, resize, pool):
    """Decode all images into ``path``."""
    total, free = 3 * int(starts[-1]), shutil.disk_usage(path.parent).free
    if total > free:
        raise UserError(
            f"cache_images: {len(paths):,} decoded images take {total / 1e9:.1f} GB, but {path.parent} has "
            f"{free / 1e9:.1f} GB; free space, choose another folder with --data-root, or use true (JPEG copies)"
        )
    logging.getLogger("pycil_wsc").warning("%s: decoding %d images, %.1f GB", path, len(paths), total / 1e9)
    partial_file = path.with_name(f".{path.name}.partial")
    with open(partial_file, "wb") as file:
        file.truncate(total)
    numbered = np.array(list(zip(paths.tolist(), starts[:-1].tolist())), dtype=object)
    decode_part = partial(_decode_into, file=partial_file, resize=resize)
    for _ in map_parts(decode_part, numbered, pool, "decoding images"):
        pass
    with open(partial_file, "r+b") as file:
        os.fsync(file.fileno())  # before the index says that it is complete
    os.replace(partial_file, path)


def _sizes_of(paths, side):
    return [_resized_size(width, height, side) for width, height in map(_size, paths)]


def _size(path):
    """Width and height of an image file; the whole file is read only if its header cannot be."""
    try:
        with Image.open(path) as image:
            return image.size
    except Exception:
        return decode(path).size


def _resized_size(width, height, side):
    """(height, width) after torchvision's ``Resize``."""
    short, long = sorted((width, height))
    other = int(side * long / short)
    return (side, other) if height <= width else (other, side)


def _decode_into(numbered, file, resize):
    with open(file, "r+b") as output:
        for path, start in numbered:
            output.seek(3 * start)
            output.write(np.asarray(resize(decode(path))).tobytes())
