"""Images that are nearly the same, such as one that was saved again or resized, by their perceptual hashes.

Each hash is compared with few others. It is cut into four bands of 16 bits: of two hashes that differ in at most six
bits, one band differs in at most one. So only hashes are compared that have a band in common but for one bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

NEAR = 6  # bits of 64 in which two hashes may differ: those of 10,000 photographs of Tiny-ImageNet differ in 8 or more
BITS = 16  # of a band
BANDS = 64 // BITS
FLIPS = [0, *(1 << bit for bit in range(BITS))]  # enough, as NEAR // BANDS is 1
PAIRS = 1 << 22  # that are compared at once
ROWS = 48  # bits for a row, below those for a distance


def near_pairs(hashes: np.ndarray, others: np.ndarray) -> list[tuple[int, int]]:
    """(place among ``hashes``, that of the nearest of ``others``) of those with a near one: uint64 (n,), (m,)."""
    different, place = np.unique(hashes, return_inverse=True)
    values, first = np.unique(others, return_index=True)
    nearest = _nearest(different, values, first, np.full(len(different), len(others)))[place]
    return _pairs(nearest)


def repeated(hashes: np.ndarray) -> list[tuple[int, int]]:
    """(place, an earlier place) of those that are near an earlier one, the nearest: uint64 (n,)."""
    different, first, place = np.unique(hashes, return_index=True, return_inverse=True)
    nearest = _nearest(different, different, first, first)[place]
    first = first[place]
    is_same = first < np.arange(len(hashes))
    return _pairs(np.where(is_same, first, nearest))


def _pairs(nearest: np.ndarray) -> list[tuple[int, int]]:
    found = np.flatnonzero(nearest >= 0)
    return list(zip(found.tolist(), nearest[found].tolist(), strict=True))


def _nearest(hashes: np.ndarray, others: np.ndarray, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
    """For each hash the row of the nearest of the ``others``, -1 if none is near; the first if several are as near.

    Args:
        hashes: uint64 (n,).
        others: uint64 (m,).
        rows: of the ``others``, int64 (m,).
        before: only rows below this count, int64 (n,).

    Returns:
        int64 (n,).
    """
    none = np.iinfo(np.int64).max
    best = np.full(len(hashes), none)  # the distance, and in its last bits the row
    for band in range(BANDS):
        of_others = _band(others, band)
        order = np.argsort(of_others, kind="stable")
        bounds = np.searchsorted(of_others[order], np.arange((1 << BITS) + 1))  # of the others with each value
        of_hashes = _band(hashes, band)
        for flip in FLIPS:
            values = of_hashes ^ flip
            for start, end in _parts(bounds[values + 1] - bounds[values]):
                asking, found = _in_common(values[start:end], bounds)
                asking += start
                found = order[found]
                distances = _differing_bits(hashes[asking] ^ others[found])
                is_near = (distances <= NEAR) & (rows[found] < before[asking])
                keys = (distances[is_near].astype(np.int64) << ROWS) | rows[found[is_near]]
                np.minimum.at(best, asking[is_near], keys)
    return np.where(best == none, -1, best & ((1 << ROWS) - 1))


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    """16 bits of each hash: int64 (n,)."""
    return ((hashes >> np.uint64(BITS * band)) & np.uint64((1 << BITS) - 1)).astype(np.int64)


def _parts(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """The ends of parts that have some ``PAIRS`` pairs each, or one hash: ``counts`` of its pairs, (n,)."""
    part = np.cumsum(counts) // PAIRS
    cuts = np.flatnonzero(np.diff(part)) + 1
    yield from pairwise([0, *cuts.tolist(), len(counts)])


def _in_common(values: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places among ``values`` and among sorted others with the same value, with these ``bounds``: (k,) and (k,)."""
    counts = bounds[values + 1] - bounds[values]
    asking = np.repeat(np.arange(len(values)), counts)
    first = np.cumsum(counts) - counts  # of the pairs of each value
    return asking, np.arange(len(asking)) + (bounds[values] - first)[asking]


def _differing_bits(differences: np.ndarray) -> np.ndarray:
    """The number of bits that are set in each uint64."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(differences)
    return np.unpackbits(np.ascontiguousarray(differences)[..., None].view(np.uint8), axis=-1).sum(-1, dtype=np.uint8)
