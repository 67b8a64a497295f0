"""Images that are nearly the same, such as one that was saved again or resized: a hash of what they show.

The hash is pHash, 64 signs of the lowest frequencies of the picture's cosine transform, by scipy, which is installed in
any case: a package for it, such as ``imagehash``, computes the same from the same transform.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image
from scipy.fft import dctn

SIDE = 32  # of the grey picture whose cosine transform is taken
LOW = 8  # frequencies in each direction
SMALLEST = 16  # side of images; smaller ones show too little
NEAR = 6  # bits of 64 in which two hashes may differ: those of 10,000 photographs of Tiny-ImageNet differ in 8 or more
CHUNK = 512  # hashes that are compared with all others at once
FLAT = 2.0  # standard deviation, of 255, below which a picture is of one colour and like any other such


def perceptual_hash(image: Image.Image) -> np.uint64 | None:
    """The hash of a PIL image; None if it is too small, or of a single colour.

    Each bit tells whether one of the 8 x 8 lowest frequencies is above their median.
    """
    if min(image.size) < SMALLEST:
        return None
    grey = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS), np.float64)
    if grey.std() < FLAT:
        return None
    frequencies = np.asarray(dctn(grey))[:LOW, :LOW].ravel()
    bits = frequencies > np.median(frequencies)
    return np.packbits(bits).view(np.uint64)[0]


def _bits(differences: np.ndarray) -> np.ndarray:
    """The number of bits that are set in each uint64."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(differences)
    return np.unpackbits(np.ascontiguousarray(differences)[..., None].view(np.uint8), axis=-1).sum(-1, dtype=np.uint8)


def near_pairs(hashes: np.ndarray, others: np.ndarray) -> Iterator[tuple[int, int]]:
    """(place among ``hashes``, that of the nearest of ``others``) of those with a near one: uint64 (n,), (m,)."""
    if not len(others):
        return
    for start in range(0, len(hashes), CHUNK):
        distances = _bits(hashes[start : start + CHUNK, None] ^ others)
        nearest = distances.argmin(1)
        for row in np.flatnonzero(distances[np.arange(len(nearest)), nearest] <= NEAR).tolist():
            yield start + row, int(nearest[row])


def repeated(hashes: np.ndarray) -> Iterator[tuple[int, int]]:
    """(place, an earlier place) of those that are near an earlier one, the nearest: uint64 (n,)."""
    for start in range(0, len(hashes), CHUNK):
        part = hashes[start : start + CHUNK]
        distances = _bits(part[:, None] ^ hashes[: start + len(part)])
        later = np.arange(len(distances[0])) >= start + np.arange(len(part))[:, None]
        distances[later] = 255
        nearest = distances.argmin(1)
        for row in np.flatnonzero(distances[np.arange(len(part)), nearest] <= NEAR).tolist():
            yield start + row, int(nearest[row])
