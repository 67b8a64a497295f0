"""Small copies of image files, made once: decoding a 500x375 photograph takes longer than training on it."""

import hashlib
import io
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from pycil_wsc.data.image_files import common_folder, decode
from pycil_wsc.data.parallel import map_parts, process_pool
from pycil_wsc.data.types import Dataset
from pycil_wsc.files import locked, write_atomically

QUALITY = 95  # of the JPEG copies
SMALL = b"\n"  # instead of the copy of an image that is small enough; a power failure may leave empty files


def resized(dataset: Dataset, root: str | Path, workers: int) -> Dataset:
    """``dataset`` with its image files replaced by small copies below ``root``.

    The copies have the short side of the test transform; an image that is not larger is not copied. Missing or outdated
    copies are made by ``workers`` processes, or in this one if they are few. Arrays in memory are left unchanged.
    Raises a :class:`UserError` if a file cannot be read or written.
    """
    if dataset.train.in_memory:
        return dataset
    side = round(dataset.info.image_size * 256 / 224)
    splits = {part: getattr(dataset, part) for part in ("train", "test")}
    base, folder = cache_folder(dataset, root, side)
    copies = {part: copied(split.images, base, folder, side, workers) for part, split in splits.items()}
    return replace(dataset, **{part: replace(split, images=copies[part]) for part, split in splits.items()})


def cache_folder(dataset: Dataset, root: str | Path, side: int) -> tuple[Path, Path]:
    """The common parent folder of the image files, and the folder below ``root`` that caches them."""
    base = Path(common_folder([*dataset.train.images.tolist(), *dataset.test.images.tolist()]))
    digest = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:8]
    return base, Path(root, "resized", f"{base.name}-{digest}-{side}")


def copied(paths: np.ndarray, base: Path, folder: Path, side: int, workers: int) -> np.ndarray:
    """The files to read instead of ``paths``, an array of str."""
    pairs = [(path, f"{folder}/{_below(path, str(base))}.jpg") for path in paths.tolist()]
    files = [_usable(*pair) for pair in pairs]
    if None in files:
        with locked(folder):  # meanwhile another process may have made them
            _copy_all([pair for pair in pairs if _usable(*pair) is None], folder, side, workers)
        files = [_usable(*pair) for pair in pairs]
    return np.array([file or path for file, (path, _) in zip(files, pairs)], dtype=str)


def _below(path, base):
    start = os.path.join(base, "")
    return path.removeprefix(start) if path.startswith(start) else Path(path).relative_to(base)


def _usable(path, copy):
    """The file to read instead of ``path``: its copy, or itself if it is small enough. None if the copy is missing or
    older.
    """
    try:
        status = os.stat(copy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not status.st_size or status.st_mtime_ns < os.stat(path).st_mtime_ns:
        return None
    return copy if status.st_size > len(SMALL) else path


def _copy_all(pairs, folder, side, workers):
    if not pairs:
        return
    logging.getLogger("pycil_wsc").info("%s: copying %d images with a short side of %d", folder, len(pairs), side)
    with process_pool(workers, len(pairs)) as pool:
        for _ in map_parts(partial(_copies, side=side), pairs, pool, "resizing images"):
            pass


def _copies(pairs, side):
    for path, copy in pairs:
        _copy(path, copy, side)


def _copy(path, copy, side):
    """Write one copy, or a marker if the image is small enough."""
    image = decode(path)
    if min(image.size) <= side:
        write_atomically(copy, SMALL, durable=False)
        return
    scale = side / min(image.size)
    size = [round(length * scale) for length in image.size]
    small = image.resize(size, Image.Resampling.BILINEAR)  # as the test transform does
    encoded = io.BytesIO()
    small.save(encoded, "JPEG", quality=QUALITY)
    write_atomically(copy, encoded.getvalue(), durable=False)
