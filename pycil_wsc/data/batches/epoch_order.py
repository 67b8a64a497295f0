"""The order of an epoch's samples, its batches, and the share of them that a process loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 128  # images that are gathered at once where batches are smaller


@dataclass(frozen=True)
class Share:
    """The share of process ``rank`` of ``count``: every ``count``-th batch or, with ``of_each``, every ``count``-th
    image of each batch.
    """

    rank: int = 0
    count: int = 1
    of_each: bool = False

    def rows(self, number: int) -> slice | None:
        """The rows of batch ``number`` that belong to this process; None if there are none."""
        if self.of_each:
            return slice(self.rank, None, self.count)
        return slice(None) if number % self.count == self.rank else None


WHOLE = Share()
Parts = list[tuple[slice, slice | None]]  # for each batch: its slice of the epoch's order, and the rows to load


def epoch_order(indices: np.ndarray, shuffle: bool, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """``indices`` as given, or shuffled by ``seed``.

    ``labels``: the class of each sample of the data set; as many samples are then drawn, equally many of each class of
    ``indices``, to one. Each sample of a class is drawn equally often, to one.
    """
    if not shuffle:
        return np.asarray(indices)
    rng = np.random.default_rng(seed)
    return rng.permutation(indices if labels is None else _stream(indices, len(indices), rng, labels))


def mixed_order(
    new: np.ndarray, old: np.ndarray, share: float, batch_size: int, seed: int, labels: np.ndarray | None = None
) -> np.ndarray:
    """An order of ``len(new) + len(old)`` samples in which each batch has the given ``share`` of ``new`` ones, rounded.

    Both arrays are passed over repeatedly, in a random order drawn by ``seed`` for each pass, so the counts of two
    samples of the same array differ by at most one. ``new`` and ``old``: int64 arrays with at least one sample each.
    ``labels``: as for :func:`epoch_order`; each array is then balanced by itself.
    """
    total, rng = len(new) + len(old), np.random.default_rng(seed)
    sizes = _batch_sizes(total, batch_size)
    counts = new_in_batches(total, share, batch_size)
    new_stream, old_stream = (
        _stream(samples, number, rng, labels) for samples, number in ((new, sum(counts)), (old, total - sum(counts)))
    )
    parts = []
    for size, count in zip(sizes, counts):
        parts += [new_stream[:count], old_stream[: size - count]]
        new_stream, old_stream = new_stream[count:], old_stream[size - count :]
    return np.concatenate(parts)


def new_in_batches(total: int, share: float, batch_size: int) -> list[int]:
    """The number of new samples in each batch of :func:`mixed_order`, of ``total`` samples in all."""
    return [round(share * size) for size in _batch_sizes(total, batch_size)]


def _batch_sizes(total, batch_size):
    return [min(batch_size, total - start) for start in range(0, total, batch_size)]


def _stream(samples, number, rng, labels=None):
    """``number`` samples from concatenated permutations, of all samples or, with ``labels``, of each class."""
    if labels is not None:
        classes, places = np.unique(labels[samples], return_inverse=True)
        quotas = np.full(len(classes), number // len(classes))
        quotas[rng.permutation(len(classes))[: number % len(classes)]] += 1
        parts = [_stream(samples[places == place], quota, rng) for place, quota in enumerate(quotas)]
        return rng.permutation(np.concatenate(parts))
    rounds = -(-number // len(samples))
    return np.concatenate([rng.permutation(samples) for _ in range(rounds)] or [samples[:0]])[:number]


def num_batches(num_samples: int, batch_size: int, join: bool = False) -> int:
    """The number of batches in an epoch of ``num_samples``; ``join`` as for :func:`batch_slices`."""
    return len(batch_slices(num_samples, batch_size, join))


def batch_slices(num_samples: int, batch_size: int, join: bool = False) -> list[slice]:
    """The slice of each batch. With ``join``, a last batch of a single sample is merged into the previous one, unless
    all batches have one sample.
    """
    starts = list(range(0, num_samples, batch_size))
    if join and batch_size > 1 and len(starts) > 1 and num_samples - starts[-1] == 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], num_samples])]


def repeated(order: np.ndarray, slices: Sequence[slice], times: int) -> tuple[np.ndarray, list[slice]]:
    """An order (n,) in which each batch comes ``times`` times in a row, (times n,), and its batches."""
    if times == 1:
        return order, list(slices)
    repetitions = [batch for batch in slices for _ in range(times)]
    ends = np.cumsum([size_of(batch) for batch in repetitions]).tolist()
    again = np.concatenate([order[batch] for batch in repetitions]) if repetitions else order
    return again, [slice(start, end) for start, end in zip([0, *ends], ends)]


def size_of(batch: slice) -> int:
    """The number of samples of a batch."""
    return batch.stop - batch.start


def chunks(parts: Parts) -> Iterator[Parts]:
    """Consecutive ``parts`` of at most ``CHUNK`` samples together; a larger batch is a chunk of its own."""
    chunk: Parts = []
    for part in parts:
        if chunk and part[0].stop - chunk[0][0].start > CHUNK:
            yield chunk
            chunk = []
        chunk.append(part)
    if chunk:
        yield chunk
