"""Small copies of image files, made once: decoding a 500x375 photograph takes longer than training on it."""

import hashlib
import io
import logging
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from pycil_wsc.data.image_files import common_folder, decode, image_status
from pycil_wsc.data.parallel import map_parts, process_pool
from pycil_wsc.data.types import Dataset
from pycil_wsc.files import locked, write_atomically

QUALITY = 95  # of the JPEG copies
SMALL = b"\n"  # instead of the copy of an image that is small enough; a power failure may leave empty files
PRECISIONS = (1, 100, 10**9)  # of the times that file systems store, in ns


def resized(dataset: Dataset, root: str | Path, workers: int) -> Dataset:
    """``dataset`` with its image files replaced by small copies below ``root``.

    The copies have the short side of the test transform and are resized by its interpolation; an image that is not
    larger is not copied. A copy has the size of its original in its name and the modification time, and is outdated if
    the original has others now. Missing or outdated copies are made by ``workers`` processes, or in this one if they
    are few. Arrays in memory are left unchanged. Raises a :class:`UserError` if a file cannot be read or written.
    """
    if dataset.train.in_memory:
        return dataset
    side, mode = round(dataset.info.image_size * 256 / 224), dataset.info.interpolation
    splits = {part: getattr(dataset, part) for part in ("train", "test")}
    base, folder = cache_folder(dataset, root, side)
    copies = {part: copied(split.images, base, folder, side, mode, workers) for part, split in splits.items()}
    return replace(dataset, **{part: replace(split, images=copies[part]) for part, split in splits.items()})


def cache_folder(dataset: Dataset, root: str | Path, side: int) -> tuple[Path, Path]:
    """The common parent folder of the image files, and the folder below ``root`` that caches them.

    It differs by ``side`` and by interpolation, which is not in the name if it is bilinear.
    """
    base = Path(common_folder([*dataset.train.images.tolist(), *dataset.test.images.tolist()]))
    digest = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:8]
    mode = dataset.info.interpolation
    return base, Path(root, "resized", f"{base.name}-{digest}-{side}" + ("" if mode == "bilinear" else f"-{mode}"))


def copied(paths: np.ndarray, base: Path, folder: Path, side: int, interpolation: str, workers: int) -> np.ndarray:
    """The files to read instead of ``paths``, an array of str."""
    pairs = [(path, f"{folder}/{_below(path, str(base))}") for path in paths.tolist()]
    files = [_usable(*pair) for pair in pairs]
    if None in files:
        with locked(folder):  # meanwhile another process may have made them
            _copy_all([pair for pair in pairs if _usable(*pair) is None], folder, side, interpolation, workers)
        files = [_usable(*pair) for pair in pairs]
    return np.array([file or path for file, (path, _) in zip(files, pairs)], dtype=str)


def _below(path, base):
    path = os.path.abspath(path) if os.path.isabs(base) else path
    start = os.path.join(base, "")
    return path.removeprefix(start) if path.startswith(start) else Path(path).relative_to(base)


def _copy_of(status, stem):
    """The name of the copy of a file with this status, which begins with ``stem``."""
    return f"{stem}.{status.st_size}.jpg"


def _usable(path, stem):
    """The file to read instead of ``path``: its copy, or itself if it is small enough. None if the copy is missing or
    outdated.
    """
    original = image_status(path)
    copy = _copy_of(original, stem)
    try:
        status = os.stat(copy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not status.st_size or not _same_time(status.st_mtime_ns, original.st_mtime_ns):
        return None
    return copy if status.st_size > len(SMALL) else path


def _same_time(copy, original):
    """Whether the times (ns) are equal, at the precision with which the copy's file system stores them."""
    return any(copy == original // precision * precision for precision in PRECISIONS)


def _copy_all(pairs, folder, side, interpolation, workers):
    if not pairs:
        return
    logging.getLogger("pycil_wsc").info("%s: copying %d images with a short side of %d", folder, len(pairs), side)
    with process_pool(workers, len(pairs)) as pool:
        copies = partial(_copies, side=side, resampling=Image.Resampling[interpolation.upper()])
        for _ in map_parts(copies, pairs, pool, "resizing images"):
            pass
    _remove_outdated(pairs)


def _remove_outdated(pairs):
    """Remove earlier copies of images that were copied now, of another size or without one in their names."""
    current = {_copy_of(image_status(path), stem): stem for path, stem in pairs}
    stems = set(current.values())
    for directory in {os.path.dirname(stem) for stem in stems}:
        for entry in os.scandir(directory):
            copy = re.fullmatch(r"(.+?)(\.\d+)?\.jpg", entry.path)
            if copy and copy[1] in stems and entry.path not in current:
                os.unlink(entry.path)


def _copies(pairs, side, resampling):
    for path, stem in pairs:
        status = image_status(path)  # before reading: a file that changes meanwhile is copied again by the next run
        copy = _copy_of(status, stem)
        write_atomically(copy, _small(decode(path), side, resampling), durable=False)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def _small(image, side, resampling):
    """The image with a short side of ``side`` as JPEG, or a marker if it is small enough."""
    if min(image.size) <= side:
        return SMALL
    scale = side / min(image.size)
    size = [round(length * scale) for length in image.size]
    encoded = io.BytesIO()
    image.resize(size, resampling).save(encoded, "JPEG", quality=QUALITY)
    return encoded.getvalue()
