"""Small copies of image files, made once: a photograph of 500x375 takes longer to decode than to train on."""

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

from pycil_wsc.data.image_files import decode
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked, write_atomically

QUALITY = 95  # of the JPEG files


def resized(dataset: Dataset, root: str | Path, workers: int) -> Dataset:
    """``dataset`` with its image files replaced by copies below ``root``, whose short side is that of its test
    transform.

    Copies are made by ``workers`` processes where they are missing or older than the file; an image that is no larger
    is used as it is. Arrays in memory stay as they are. Raises :class:`UserError` for a file that cannot be read or
    written.
    """
    if dataset.train.in_memory:
        return dataset
    side = round(dataset.info.image_size * 256 / 224)
    splits = {part: getattr(dataset, part) for part in ("train", "test")}
    base, folder = places(dataset, root, side)
    copies = {part: copied(split.images, base, folder, side, workers) for part, split in splits.items()}
    return replace(dataset, **{part: replace(split, images=copies[part]) for part, split in splits.items()})


def places(dataset: Dataset, root: str | Path, side: int) -> tuple[Path, Path]:
    """The folder that all image files are in, and the one below ``root`` for what is made of them."""
    base = Path(os.path.commonpath([*dataset.train.images, *dataset.test.images]))
    digest = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:8]
    return base, Path(root, "resized", f"{base.name}-{digest}-{side}")


def copied(paths: np.ndarray, base: Path, folder: Path, side: int, workers: int) -> np.ndarray:
    """The files to read in place of ``paths``, an array of str."""
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


def _fresh(path, copy):
    return copy.exists() and copy.stat().st_mtime_ns >= os.stat(path).st_mtime_ns


def _copy(pair, side):
    """Write one copy; an empty file says that the image is small enough. Returns what went wrong, or None."""
    path, copy = pair
    try:
        image = decode(path)
        if min(image.size) <= side:
            write_atomically(copy, b"")
            return None
        scale = side / min(image.size)
        small = image.resize(
            [round(length * scale) for length in image.size], Image.Resampling.BILINEAR
        )  # as the test transform does
        encoded = io.BytesIO()
        small.save(encoded, "JPEG", quality=QUALITY)
        write_atomically(copy, encoded.getvalue())
    except UserError as error:
        return str(error)
