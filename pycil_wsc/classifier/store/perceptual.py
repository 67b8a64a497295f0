"""A hash of what an image shows, which is nearly the same after it was saved again or resized.

The hash is pHash, 64 signs of the lowest frequencies of the picture's cosine transform, by scipy, which is installed in
any case; a test compares it with that of the package ``imagehash``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from scipy.fft import dctn

from pycil_wsc.classifier.store.hashes import digests_of
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.images.parallel import at_most_one_per_core
from pycil_wsc.data.images.paths import names_in
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError

SIDE = 32  # of the grey picture whose cosine transform is taken
LOW = 8  # frequencies in each direction
SMALLEST = 16  # side of images; smaller ones show too little
FLAT = 2.0  # standard deviation, of 255, below which a picture is of one colour and like any other such
NONE = np.uint64(0)  # in place of the hash of an image that has none; no picture has it, as some frequency is above 0
CHUNK = 4096  # files that are given to the threads at once


def perceptual_hash(image: Image.Image) -> np.uint64:
    """The hash of a PIL image; ``NONE`` if it is too small, or of a single colour.

    Each bit tells whether one of the 8 x 8 lowest frequencies is above their median.
    """
    if min(image.size) < SMALLEST:
        return NONE
    grey = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS), np.float64)
    if grey.std() < FLAT:
        return NONE
    frequencies = np.asarray(dctn(grey))[:LOW, :LOW].ravel()
    bits = frequencies > np.median(frequencies)
    return np.packbits(bits).view(np.uint64)[0]


def perceptual_hashes_of(split: Split, workers: int = 0) -> np.ndarray:
    """The hash of each image, ``NONE`` also of files that cannot be read: uint64 (n,). ``workers``: threads."""
    if split.in_memory:
        return np.array([perceptual_hash(Image.fromarray(image)) for image in split.images], np.uint64)
    hashes = np.full(len(split), NONE)
    with ThreadPoolExecutor(max(1, at_most_one_per_core(workers))) as pool:
        for start in range(0, len(split), CHUNK):
            paths = names_in(split.images[start : start + CHUNK])
            hashes[start : start + CHUNK] = list(pool.map(_hash_or_none, paths))
    return hashes


def hash_of_picture(path: str) -> np.uint64:
    """The hash of an image file, of which a JPEG is decoded at a smaller size. Raises :class:`UserError`."""
    return perceptual_hash(decode(path, 4 * SIDE))


def _hash_or_none(path: str) -> np.uint64:
    try:
        return hash_of_picture(path)
    except UserError:
        return NONE


@dataclass(frozen=True, eq=False)
class PerceptualHashes:
    """The perceptual hashes of images, by their digests.

    Args:
        digests: of the images (:func:`~pycil_wsc.classifier.store.hashes.digests_of`): int64 (n,), ascending.
        hashes: uint64 (n,), ``NONE`` of those that have none.
    """

    digests: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    def with_images(self, split: Split, known: Mapping[str, str], workers: int) -> PerceptualHashes:
        """These and those of the images of ``split``. ``known``: the SHA-256 of files, which are then not read."""
        digests, first = np.unique(digests_of(split, known), return_index=True)
        is_new = ~np.isin(digests, self.digests)
        rows = first[is_new]
        hashes = perceptual_hashes_of(Split(split.images[rows], split.targets[rows]), workers)
        both = np.concatenate([self.digests, digests[is_new]])
        order = np.argsort(both)
        return PerceptualHashes(both[order], np.concatenate([self.hashes, hashes])[order])

    def without(self, digests: np.ndarray) -> PerceptualHashes:
        """Those of the other images."""
        return self._chosen(~np.isin(self.digests, digests))

    def existing(self) -> PerceptualHashes:
        """Those that are not ``NONE``."""
        return self._chosen(self.hashes != NONE)

    def _chosen(self, rows: np.ndarray) -> PerceptualHashes:
        return PerceptualHashes(self.digests[rows], self.hashes[rows])

    @property
    def problem(self) -> str:
        """What is wrong with these, which were read from a file; "" if nothing is."""
        is_typed = self.digests.dtype == np.int64 and self.hashes.dtype == np.uint64
        fits = is_typed and self.digests.ndim == 1 and self.digests.shape == self.hashes.shape
        return "" if fits and (self.digests[1:] > self.digests[:-1]).all() else "perceptual hashes"
