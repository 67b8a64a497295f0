"""Decodes image files once into a single file, which all processes of a machine map into memory.

The file holds the images as uint8, concatenated, resized to the short side of the test transform. An index stores
where each image begins, and a digest of each image file's path, size and time and of how files are decoded. It is
written last: if it is missing or damaged, a digest differs, or the file of images has another size, both are made
again. Images that are unchanged in any file of the folder are then copied from there, not decoded.
"""

import contextlib
import hashlib
import io
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycil_wsc.data.images.image_files import DECODING, common_folder, decode, image_status, middle_box, open_file
from pycil_wsc.data.images.parallel import map_parts, process_pool
from pycil_wsc.data.types import Dataset, ImageMap
from pycil_wsc.errors import Unwritable, UserError
from pycil_wsc.files import locked_if_writable, opened, write_atomically
from pycil_wsc.lazy import Lazy

v2: Any = Lazy("torchvision.transforms.v2")


class Index(NamedTuple):
    """What is in a file of images.

    ``keys``: bytes (N,), the digest of each image file; ``starts``: int64 (N + 1,), the first pixel of each image, and
    the number of pixels; ``sizes``: int64 (N, 2), height and width.
    """

    keys: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def decoded(dataset: Dataset, root: str | Path, workers: int, on_device: bool) -> Dataset:
    """``dataset`` with its image files decoded once, in a folder below ``root``; arrays in memory are left unchanged.

    ``on_device``: hold the images on the training device if they fit. Raises a :class:`UserError` if a file cannot be
    read or the disk has too little space.
    """
    if dataset.train.in_memory:
        return dataset
    side = dataset.info.resized_side
    paths = np.unique(np.concatenate([dataset.train.images, dataset.test.images]))
    mode = dataset.info.tested_interpolation
    images = image_map(paths, _cache_folder(dataset, root, side), side, mode, workers)
    splits = {
        part: replace(split, decoded=images.of(np.searchsorted(paths, split.images)), on_device=on_device)
        for part, split in (("train", dataset.train), ("test", dataset.test))
    }
    return replace(dataset, **splits)


def _cache_folder(dataset: Dataset, root: str | Path, side: int) -> Path:
    """The folder below ``root`` for the common parent folder of the image files, this side and the interpolation.

    Bilinear interpolation is not in the name.
    """
    base = Path(common_folder([*dataset.train.images.tolist(), *dataset.test.images.tolist()]))
    digest = hashlib.sha256(os.fsencode(base.resolve())).hexdigest()[:8]
    mode = dataset.info.tested_interpolation
    return Path(root, "resized", f"{base.name}-{digest}-{side}" + ("" if mode == "bilinear" else f"-{mode}"))


def image_map(paths: np.ndarray, folder: Path, side: int, interpolation: str, workers: int) -> ImageMap:
    """The images of ``paths``, resized to a short side of ``side``, cached in ``folder``.

    Images that are not cached yet are decoded by ``workers`` processes. Raises a :class:`UserError` if a file cannot be
    read or the disk has too little space.
    """
    keys, listed = _keys(paths, side, interpolation), hashlib.sha256(os.fsencode("\n".join(paths)))
    name = f"decoded-{listed.hexdigest()[:8]}"
    path, index = folder / f"{name}.uint8", folder / f"{name}.npz"
    with locked_if_writable(folder, ".lock"):  # a whole file is read without
        known = _read(index)
        if known is None or not np.array_equal(known.keys, keys):
            if folders := [file for file in (path, index) if file.is_dir()]:
                raise UserError(f"cache_images: {folders[0]} is a folder, where a file is to be written; move it away")
            earlier = _earlier(folder)
            known = _make(paths, keys, path, side, interpolation, earlier, workers)
            _write_index(index, known)
        return _map_of(path, known)


def _keys(paths: np.ndarray, side: int, interpolation: str) -> np.ndarray:
    """A digest of the path, size and time of each file, and of how it is decoded."""
    before, keys = hashlib.sha256(f"{side} {interpolation} {DECODING}".encode()), []
    for path in paths.tolist():
        status, digest = image_status(path), before.copy()
        digest.update(b"%s\0%d %d" % (os.fsencode(os.path.abspath(path)), status.st_size, status.st_mtime_ns))
        keys.append(digest.hexdigest()[:32].encode())
    return np.array(keys, dtype="S32")


def _read(index: Path) -> Index | None:
    """The index; None if it is missing or damaged, or if the file of images beside it is not whole."""
    try:
        with opened(index) as content, np.load(content) as file:
            known = Index(file["keys"], file["starts"], file["sizes"])
        return known if index.with_suffix(".uint8").stat().st_size == 3 * known.starts[-1] else None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile):
        return None


def _map_of(path: Path, known: Index) -> ImageMap:
    return ImageMap(path, known.starts[:-1], known.sizes, path.stat().st_mtime_ns)


def _earlier(folder: Path) -> dict[bytes, tuple[ImageMap, int]]:
    """What is cached in ``folder``: for each digest, a file of images and the number of the image in it."""
    cached = {}
    for index in sorted(folder.glob("decoded-*.npz")):
        known = _read(index)
        if known is not None:
            images = _map_of(index.with_suffix(".uint8"), known)
            cached |= {key: (images, number) for number, key in enumerate(known.keys.tolist())}
    return cached


def _write_index(index: Path, known: Index) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **known._asdict())
    write_atomically(index, buffer.getvalue())


def _make(
    paths: np.ndarray,
    keys: np.ndarray,
    path: Path,
    side: int,
    interpolation: str,
    earlier: dict[bytes, tuple[ImageMap, int]],
    workers: int,
) -> Index:
    """Write all images to ``path``: copied if they are in an ``earlier`` file, else decoded."""
    copied = [earlier.get(key) for key in keys.tolist()]
    new = np.array([number for number, source in enumerate(copied) if source is None], dtype=np.int64)
    sizes = np.empty((len(paths), 2), np.int64)
    for number, source in enumerate(copied):
        if source is not None:
            images, place = source
            sizes[number] = images.sizes[place]
    with process_pool(workers, len(new)) as pool:
        sizes[new] = _sizes(paths[new], side, pool)
        starts = np.concatenate([[0], np.cumsum(sizes.prod(1))])
        _check_space(path, len(new), 3 * int(starts[-1]))
        numbered = np.array(list(zip(paths[new].tolist(), starts[new].tolist())), dtype=object)
        resize = v2.Resize(side, v2.InterpolationMode(interpolation))
        with _replacing(path) as file:
            with open(file, "wb") as output:
                output.truncate(3 * int(starts[-1]))
                for start, source in zip(starts, copied):
                    if source is not None:
                        images, place = source
                        output.seek(3 * start)
                        output.write(images.image(place).tobytes())
            decode_part = partial(_decode_into, file=file, resize=resize)
            outcomes = [size for part in map_parts(decode_part, numbered, pool, "decoding images") for size in part]
            if problems := [size for size in outcomes if isinstance(size, str)]:
                raise _unreadable(problems)
            sizes[new] = np.array(outcomes, np.int64).reshape(-1, 2)  # of the turned image
    return Index(keys, starts, sizes)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new file to write to, which takes the place of ``path`` at the end; of an error, nothing is left."""
    file = path.with_name(f".{path.name}.partial")
    try:
        yield file
        with open(file, "r+b") as written:
            os.fsync(written.fileno())  # before the index says that it is complete
        path.with_suffix(".npz").unlink(missing_ok=True)  # the index of the images that are replaced
        os.replace(file, path)
    except OSError as error:
        raise Unwritable(
            f"cache_images: {path} cannot be written ({error.strerror or error}); free space, choose another folder "
            "with --data-root, or use false"
        ) from None
    finally:
        file.unlink(missing_ok=True)


def _check_space(path: Path, number: int, total: int) -> None:
    """Log how many images are decoded, and raise a :class:`UserError` if the disk has no space for ``total`` bytes."""
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise UserError(
            f"cache_images: the decoded images take {total / 1e9:.1f} GB, but {path.parent} has {free / 1e9:.1f} GB; "
            "free space, choose another folder with --data-root, or use false"
        )
    logging.getLogger("pycil_wsc").warning("%s: decoding %d images, %.1f GB in all", path, number, total / 1e9)


def _sizes(paths: np.ndarray, side: int, pool: ProcessPoolExecutor | None) -> np.ndarray:
    """Height and width of each image after resizing: int64 (N, 2). EXIF data may still exchange the two."""
    parts = map_parts(partial(_sizes_of, side=side), paths, pool, "reading sizes of images")
    sizes = [size for part in parts for size in part]
    if problems := [size for size in sizes if isinstance(size, str)]:
        raise _unreadable(problems)
    return np.array(sizes, np.int64).reshape(-1, 2)


def _unreadable(problems: list[str]) -> UserError:
    more = f"; {len(problems) - 1:,} other image(s) cannot be read either" if len(problems) > 1 else ""
    return UserError(problems[0] + more)


def _sizes_of(paths: np.ndarray, side: int) -> list[tuple[int, int] | str]:
    """The size of each image, or a line for one that cannot be read."""
    return [size if isinstance(size, str) else _resized_size(*size, side) for size in map(_size, paths)]


def _size(path: str) -> tuple[int, int] | str:
    """Width and height of an image file, decoded; the whole file is read only if its header cannot be."""
    try:
        with open_file(path) as image:
            left, top, right, bottom = middle_box(*image.size)
            return right - left, bottom - top
    except Exception:
        try:
            return decode(path).size
        except UserError as error:
            return str(error)


def _resized_size(width: int, height: int, side: int) -> tuple[int, int]:
    """(height, width) after torchvision's ``Resize``."""
    short, long = sorted((width, height))
    other = int(side * long / short)
    return (side, other) if height <= width else (other, side)


def _decode_into(numbered: np.ndarray, file: Path, resize: Callable[[Any], Any]) -> list[tuple[int, int] | str]:
    """Decode image files to their offsets, counted in pixels.

    Returns the height and width of each resized image, or a line for one that cannot be read.
    """
    outcomes: list[tuple[int, int] | str] = []
    with open(file, "r+b") as output:
        for path, start in numbered:
            try:
                image = decode(path)
            except UserError as error:
                outcomes.append(str(error))
                continue
            pixels = np.asarray(resize(image))
            output.seek(3 * start)
            output.write(pixels.tobytes())
            outcomes.append(pixels.shape[:2])
    return outcomes
