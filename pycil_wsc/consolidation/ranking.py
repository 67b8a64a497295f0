"""Selects the elements with the highest scores: an exact count, in memory that does not grow with the model."""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 2**20  # elements processed at a time
DIGIT = 16  # bits of a score that one histogram resolves
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Scores(Protocol):
    """The scores of one parameter: a float tensor, or an object that computes a block of them on request.

    Each block is requested a few times, so that the scores of a whole model need not be held in memory.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


class Peers(Protocol):
    """The processes among which the parameters are sharded."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all processes."""
        ...

    def before(self, count: int) -> int:
        """The sum of ``count`` over the processes before this one."""
        ...


class Alone:
    """:class:`Peers` of a process that holds whole parameters."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def before(self, count: int) -> int:
        return 0


def top_mask(
    scores: Sequence[Scores],
    retain: float,
    scope: str = "global",
    eligible: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Mark the ``round(retain * n)`` highest of the n eligible elements: a list of bool tensors.

    The count is exact for any finite scores: ties are broken by parameter, then by position. A threshold alone would
    mark every element when most scores are zero, as the scores of unused weights are.

    Args:
        scores: one entry per parameter; see :class:`Scores`.
        retain: fraction of the eligible elements to mark, 0..1.
        scope: ``"global"`` ranks the elements of all tensors together, ``"tensor"`` those of each tensor separately.
        eligible: bool tensors (None: the whole tensor); other elements are neither counted nor marked.

    Raises:
        ValueError: ``retain`` is not within 0..1, or ``scope`` is unknown.
    """
    masks = [torch.empty(score.shape, dtype=torch.bool, device=score.device) for score in scores]
    for i, index, mask in top_blocks(scores, retain, scope, eligible):
        masks[i][index] = mask
    return masks


def top_blocks(
    scores: Sequence[Scores],
    retain: float,
    scope: str = "global",
    eligible: Sequence[Tensor | None] | None = None,
    peers: Peers | None = None,
) -> Iterator[tuple[int, tuple, Tensor]]:
    """:func:`top_mask` in blocks: yields (i, index, mask of ``scores[i][index]``), each element once.

    ``peers``: None, or the processes that hold the other parts of the same tensors; all their elements are ranked
    together. Raises ValueError as :func:`top_mask`, when the first block is requested.
    """
    check_share("retain", retain)
    allowed = [None] * len(scores) if eligible is None else list(eligible)
    if scope == "global":
        yield from _top(range(len(scores)), scores, retain, allowed, peers or Alone())
    elif scope == "tensor":
        for i in range(len(scores)):
            yield from _top([i], scores, retain, allowed, peers or Alone())
    else:
        raise ValueError(f"scope={scope!r} is unknown; known: 'global', 'tensor'")


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is a fraction: give a number from 0 to 1")


def blocks(shape: Sequence[int], first: tuple = ()) -> Iterator[tuple]:
    """Indices that split a tensor into views of at most BLOCK elements, in order of position."""
    if not shape:
        yield first
    elif math.prod(shape[1:]) > BLOCK:
        for row in range(shape[0]):
            yield from blocks(shape[1:], (*first, row))
    elif math.prod(shape):
        rows = BLOCK // math.prod(shape[1:])
        for start in range(0, shape[0], rows):
            yield (*first, slice(start, start + rows))


def _top(group, scores, retain, eligible, peers):
    ranked = _Ranked([scores[i] for i in group], [eligible[i] for i in group])
    threshold, ties_kept, ties = _threshold(ranked, retain, peers)
    for i in group:
        for index in blocks(scores[i].shape):
            score = scores[i][index].to(ranked.dtype)
            allowed = True if eligible[i] is None else eligible[i][index]
            if ties_kept == ties:
                yield i, index, (score >= threshold) & allowed
                continue
            tied = (score == threshold) & allowed
            first = tied & (tied.flatten().cumsum(0).view(score.shape) <= ties_kept)
            yield i, index, (score > threshold) & allowed | first
            ties_kept -= int(first.sum())
            ties -= int(tied.sum())


class _Ranked:
    """Iterable, several times, over the eligible scores of a group in 1-D tensors of at most BLOCK elements."""

    def __init__(self, scores, eligible):
        self.scores = scores
        self.eligible = eligible
        self.total = sum(
            math.prod(s.shape) if e is None else int(e.sum()) for s, e in zip(scores, eligible, strict=True)
        )
        self.dtype = reduce(torch.promote_types, (score.dtype for score in scores), torch.float32)
        self.cached = list(self._compute()) if self.total <= BLOCK else None

    def __iter__(self):
        return iter(self._compute() if self.cached is None else self.cached)

    def _compute(self):
        parts = []
        size = 0
        for score, allowed in zip(self.scores, self.eligible):
            for index in blocks(score.shape):
                part = (score[index] if allowed is None else score[index][allowed[index]]).to(self.dtype).flatten()
                if parts and (size + len(part) > BLOCK or part.device != parts[0].device):
                    yield torch.cat(parts)
                    parts = []
                    size = 0
                parts.append(part)
                size += len(part)
        if parts:
            yield torch.cat(parts)


def _threshold(ranked, retain, peers):
    """(score, ties kept, ties): elements above ``score`` are kept, and the first of this process's ties with it."""
    total = int(peers.sum(torch.tensor(ranked.total)))
    count = round(retain * total)
    if count == 0:
        return math.nan, 0, 0  # nothing is above it and nothing equals it
    score = _highest(ranked, total, count, peers)
    above = sum(int((part > score).sum()) for part in ranked)
    ties = sum(int((part == score).sum()) for part in ranked)
    ties_kept = count - int(peers.sum(torch.tensor(above))) - peers.before(ties)
    return score, min(max(ties_kept, 0), ties), ties


def _highest(ranked, total, count, peers):
    """The ``count``-th highest of ``total`` scores, found by histograms of their leading bits.

    Once the candidates fit into one block they are compared directly. If they are spread over several processes, the
    histograms continue to the last bit.
    """
    size = 2**DIGIT
    shift = torch.iinfo(BITS[ranked.dtype]).bits
    left = total  # number of candidates
    lowest = -size // 2  # the lowest digit: the first one is signed
    prefix = None  # the candidates' leading bits, once known
    while (left > BLOCK or not isinstance(peers, Alone)) and shift:
        histogram = torch.zeros(size, dtype=torch.int64)
        for scores in ranked:
            digits = (_keys(_candidates(scores, shift, prefix)) >> (shift - DIGIT)) - lowest
            histogram += torch.bincount(digits, minlength=size).cpu()
        histogram = peers.sum(histogram)
        at_least = histogram.flip(0).cumsum(0)  # how many have the highest digit, one of the highest two, ...
        digit = size - 1 - int(torch.searchsorted(at_least, count))
        left = int(histogram[digit])
        count -= int(at_least[-1 - digit] - histogram[digit])  # without those of higher digits
        shift -= DIGIT
        prefix = lowest + digit
        lowest = prefix * size
    if not shift:
        return _score(prefix, ranked.dtype)  # all bits are known
    parts = [_candidates(scores, shift, prefix) for scores in ranked]
    # Not kthvalue: on CUDA it is refused under torch.use_deterministic_algorithms.
    return torch.cat([part.to(parts[0].device) for part in parts]).topk(count, sorted=False).values.min().item()


def _candidates(scores, shift, prefix):
    return scores if prefix is None else scores[_keys(scores) >> shift == prefix]


def _keys(scores):
    """Integers that sort like the scores (-0.0 before 0.0)."""
    return _flip_negative(scores.view(BITS[scores.dtype]))


def _score(key, dtype):
    """The score with that key."""
    return _flip_negative(torch.tensor(key, dtype=BITS[dtype])).view(dtype).item()


def _flip_negative(bits):
    """Flip all bits but the sign of negative floats, given as integers; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ (bits >> (info.bits - 1)) & info.max
