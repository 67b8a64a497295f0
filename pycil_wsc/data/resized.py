"""Small copies of image files, made once: decoding a 500x375 photograph takes longer than training on it."""

import hashlib
import io
import logging
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from pycil_wsc.data.image_files import common_folder, decode
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked, write_atomically

<<<<<<< HEAD
QUALITY = 95  # of the JPEG copies
=======
QUALITY = 95  # of the JPEG files
SMALL = b"\n"  # in place of the copy of an image that is small enough; a power failure may leave files that are empty
>>>>>>> c32a95c (Copies of image files are made without waiting for the disk at each, and compared in less time)


def resized(dataset: Dataset, root: str | Path, workers: int) -> Dataset:
    """``dataset`` with its image files replaced by small copies below ``root``.

    The copies have the short side of the test transform; an image that is not larger is not copied. Missing or outdated
    copies are made by ``workers`` processes. Arrays in memory are left unchanged. Raises a :class:`UserError` if a file
    cannot be read or written.
    """
    if dataset.train.in_memory:
        return dataset
    side = round(dataset.info.image_size * 256 / 224)
    splits = {part: getattr(dataset, part) for part in ("train", "test")}
    base, folder = cache_folder(dataset, root, side)
    copies = {part: copied(split.images, base, folder, side, workers) for part, split in splits.items()}
    return replace(dataset, **{part: replace(split, images=copies[part]) for part, split in splits.items()})


<<<<<<< HEAD
def cache_folder(dataset: Dataset, root: str | Path, side: int) -> tuple[Path, Path]:
    """The common parent folder of the image files, and the folder below ``root`` that caches them."""
    base = Path(os.path.commonpath([*dataset.train.images, *dataset.test.images]))
=======
def places(dataset: Dataset, root: str | Path, side: int) -> tuple[Path, Path]:
    """The folder that all image files are in, and the one below ``root`` for what is made of them."""
    base = Path(common_folder([*dataset.train.images.tolist(), *dataset.test.images.tolist()]))
>>>>>>> c32a95c (Copies of image files are made without waiting for the disk at each, and compared in less time)
    digest = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:8]
    return base, Path(root, "resized", f"{base.name}-{digest}-{side}")


def copied(paths: np.ndarray, base: Path, folder: Path, side: int, workers: int) -> np.ndarray:
<<<<<<< HEAD
    """The files to read instead of ``paths``, an array of str."""
    wanted = [folder / f"{Path(path).relative_to(base)}.jpg" for path in paths]
    with locked(folder):
        missing = [(path, copy) for path, copy in zip(paths, wanted) if not _fresh(path, copy)]
        if missing:
            logging.getLogger("pycil_wsc").info(
                "%s: copying %d images with a short side of %d", folder, len(missing), side
            )
            with ProcessPoolExecutor(max(1, workers), get_context("spawn")) as pool:
                for problem in tqdm(
                    pool.map(partial(_copy, side=side), missing, chunksize=32),
                    "resizing images",
                    len(missing),
                    leave=False,
                ):
                    if problem:
                        pool.shutdown(cancel_futures=True)
                        raise UserError(problem)
    return np.array([str(copy) if copy.stat().st_size else path for path, copy in zip(paths, wanted)])
=======
    """The files to read in place of ``paths``, an array of str."""
    pairs = [(path, f"{folder}/{_below(path, str(base))}.jpg") for path in paths.tolist()]
    files = [_usable(*pair) for pair in pairs]
    if None in files:
        with locked(folder):  # meanwhile another process may have made them
            _copy_all([pair for pair in pairs if _usable(*pair) is None], folder, side, workers)
        files = [_usable(*pair) for pair in pairs]
    return np.array([file or path for file, (path, _) in zip(files, pairs)], dtype=str)
>>>>>>> c32a95c (Copies of image files are made without waiting for the disk at each, and compared in less time)


def _below(path, base):
    start = os.path.join(base, "")
    return path.removeprefix(start) if path.startswith(start) else Path(path).relative_to(base)


def _usable(path, copy):
    """The file to read in place of ``path``: its copy, or itself if it is small enough. None: there is no copy, or an
    older one.
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
    with ProcessPoolExecutor(max(1, workers), get_context("spawn")) as pool:
        copying = pool.map(partial(_copy, side=side), pairs, chunksize=32)
        for problem in tqdm(copying, "resizing images", len(pairs), leave=False):
            if problem:
                pool.shutdown(cancel_futures=True)
                raise UserError(problem)


def _copy(pair, side):
<<<<<<< HEAD
    """Write one copy, or an empty file if the image is small enough. Returns an error message or None."""
=======
    """Write one copy, or that the image is small enough. Returns what went wrong, or None."""
>>>>>>> c32a95c (Copies of image files are made without waiting for the disk at each, and compared in less time)
    path, copy = pair
    try:
        image = decode(path)
        if min(image.size) <= side:
            write_atomically(copy, SMALL, durable=False)
            return None
        scale = side / min(image.size)
        small = image.resize(
            [round(length * scale) for length in image.size], Image.Resampling.BILINEAR
        )  # as the test transform does
        encoded = io.BytesIO()
        small.save(encoded, "JPEG", quality=QUALITY)
        write_atomically(copy, encoded.getvalue(), durable=False)
    except UserError as error:
        return str(error)
