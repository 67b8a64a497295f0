"""Which elements have the highest scores: by exact count, in memory that does not grow with the model.

Scores are float tensors, or anything with ``shape``, ``dtype``, ``device`` and ``scores[index]`` that computes a block of them when asked
for it. Blocks are asked for a few times each, so that the scores of a whole model need not be held.
"""

import math
from functools import reduce

import torch

BLOCK = 2**20  # elements looked at together
DIGIT = 16  # leading bits of a score that one histogram tells apart
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def top_mask(scores, retain, scope="global", eligible=None):
    """Mark the ``round(retain * n)`` highest of the n eligible elements: a list of bool tensors.

    The number is exact whatever the scores (finite, any sign): of equals the first are marked, by parameter and then by
    position. A threshold alone would mark every element when most scores are zero, as those of unused weights are.

    ``scope``: ``"global"`` ranks the elements of all tensors together, ``"tensor"`` those of each tensor by themselves.
    ``eligible``: None, or a list of bool tensors (None: the whole tensor); other elements are neither counted nor marked.
    """
    masks = [torch.empty(score.shape, dtype=torch.bool, device=score.device) for score in scores]
    for i, index, mask in top_blocks(scores, retain, scope, eligible):
        masks[i][index] = mask
    return masks


def top_blocks(scores, retain, scope="global", eligible=None, peers=None):
    """:func:`top_mask` in blocks: yields (i, index, mask) with the mask of ``scores[i][index]``. Every element comes once.

    ``peers``: None, or the processes that hold the other parts of the same tensors, whose elements are ranked together. An object with
    ``sum(tensor)``, the sum over all processes, and ``before(count)``, the sum of an int over the processes before this one.
    """
    eligible = [None] * len(scores) if eligible is None else eligible
    if scope == "global":
        yield from _top(range(len(scores)), scores, retain, eligible, peers or Alone())
    elif scope == "tensor":
        for i in range(len(scores)):
            yield from _top([i], scores, retain, eligible, peers or Alone())
    else:
        raise ValueError(f"scope={scope!r} is unknown; known: 'global', 'tensor'")


def blocks(shape, first=()):
    """Indices that cut a tensor into views of at most BLOCK elements, in the order of their positions."""
    if not shape:
        yield first
    elif math.prod(shape[1:]) > BLOCK:
        for row in range(shape[0]):
            yield from blocks(shape[1:], (*first, row))
    elif math.prod(shape):
        rows = BLOCK // math.prod(shape[1:])
        for start in range(0, shape[0], rows):
            yield (*first, slice(start, start + rows))


class Alone:
    """No other processes."""

    def sum(self, tensor):
        return tensor

    def before(self, count):
        return 0


def _top(group, scores, retain, eligible, peers):
    ranked = _Ranked([scores[i] for i in group], [eligible[i] for i in group])
    threshold, vacant, ties = _threshold(ranked, retain, peers)
    for i in group:
        for index in blocks(scores[i].shape):
            score, allowed = scores[i][index].to(ranked.dtype), True if eligible[i] is None else eligible[i][index]
            if vacant == ties:
                yield i, index, (score >= threshold) & allowed
                continue
            tied = (score == threshold) & allowed
            first = tied & (tied.flatten().cumsum(0).view(score.shape) <= vacant)
            yield i, index, (score > threshold) & allowed | first
            vacant, ties = vacant - int(first.sum()), ties - int(tied.sum())


class _Ranked:
    """The eligible scores of a group, to be gone through several times: an iterable of 1-D tensors of at most BLOCK elements."""

    def __init__(self, scores, eligible):
        self.scores, self.eligible = scores, eligible
        self.total = sum(
            math.prod(s.shape) if e is None else int(e.sum()) for s, e in zip(scores, eligible, strict=True)
        )
        self.dtype = reduce(torch.promote_types, (score.dtype for score in scores), torch.float32)
        self.made = list(self._make()) if self.total <= BLOCK else None

    def __iter__(self):
        return iter(self._make() if self.made is None else self.made)

    def _make(self):
        parts, size = [], 0
        for score, allowed in zip(self.scores, self.eligible):
            for index in blocks(score.shape):
                part = (score[index] if allowed is None else score[index][allowed[index]]).to(self.dtype).flatten()
                if parts and (size + len(part) > BLOCK or part.device != parts[0].device):
                    yield torch.cat(parts)
                    parts, size = [], 0
                parts.append(part)
                size += len(part)
        if parts:
            yield torch.cat(parts)


def _threshold(ranked, retain, peers):
    """-> (score, vacant, ties): kept are the elements above ``score``, and of the ``ties`` here that equal it the first ``vacant``."""
    total = int(peers.sum(torch.tensor(ranked.total)))
    if (count := round(retain * total)) == 0:
        return math.nan, 0, 0  # nothing is above it and nothing equals it
    score = _highest(ranked, total, count, peers)
    above, ties = (sum(int(relation(each, score).sum()) for each in ranked) for relation in (torch.gt, torch.eq))
    vacant = count - int(peers.sum(torch.tensor(above))) - peers.before(ties)
    return score, min(max(vacant, 0), ties), ties


def _highest(ranked, total, count, peers):
    """The ``count``-th highest of ``total``: histograms of leading bits narrow down the field in which it lies.

    A field that fits into one block is looked at whole, unless it lies in several processes: they go on to the last bit.
    """
    size, shift = 2**DIGIT, torch.iinfo(BITS[ranked.dtype]).bits
    left, lowest, prefix = total, -size // 2, None  # elements in the field; their keys, shifted, all give the prefix
    while (left > BLOCK or not isinstance(peers, Alone)) and shift:
        histogram = torch.zeros(size, dtype=torch.int64)
        for scores in ranked:
            digits = (_keys(_within(scores, shift, prefix)) >> (shift - DIGIT)) - lowest
            histogram += torch.bincount(digits, minlength=size).cpu()
        histogram = peers.sum(histogram)
        at_least = histogram.flip(0).cumsum(0)  # how many have the highest digit, one of the highest two, ...
        digit = size - 1 - int(torch.searchsorted(at_least, count))
        left, count = int(histogram[digit]), count - int(at_least[-1 - digit] - histogram[digit])
        shift, prefix, lowest = shift - DIGIT, lowest + digit, (lowest + digit) * size
    if not shift:
        return _score(prefix, ranked.dtype)  # all bits are known
    field = (_within(scores, shift, prefix) for scores in ranked)
    parts = list(field)
    # Not kthvalue: on CUDA it is refused under torch.use_deterministic_algorithms.
    return torch.cat([part.to(parts[0].device) for part in parts]).topk(count, sorted=False).values.min().item()


def _within(scores, shift, prefix):
    return scores if prefix is None else scores[_keys(scores) >> shift == prefix]


def _keys(scores):
    """Whole numbers in the order of the scores (-0.0 before 0.0): a float's bits, all but the sign turned over where it is negative."""
    bits = scores.view(BITS[scores.dtype])
    return _turned(bits)


def _score(key, dtype):
    """The score with that key."""
    return _turned(torch.tensor(key, dtype=BITS[dtype])).view(dtype).item()


def _turned(bits):
    info = torch.iinfo(bits.dtype)
    return bits ^ (bits >> (info.bits - 1)) & info.max
