"""Damaged files, states of which a part is dropped or replaced, and what a damaged run must not change."""

import functools
import json
import random
from pathlib import Path
from typing import Any


def a_bit_flipped(content, position, bit=2):
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def each_with_a_bit_flipped(path, number):
    """Flip a bit of the file at ``path``, ``number`` times, each at another position, which is yielded."""
    whole, chance = path.read_bytes(), random.Random(0)
    for position in chance.sample(range(len(whole)), number):
        path.write_bytes(a_bit_flipped(whole, position, chance.randrange(8)))
        yield position


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Flip bits; cut off, clear, repeat or insert bytes."""
    where, length = rng.randrange(len(content) + 1), rng.randrange(1, 40)
    kind = rng.choice(["flip", "cut", "clear", "double", "insert"])
    if kind == "flip":
        flipped = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == "cut":
        return content[:where]
    if kind == "clear":
        return content[:where] + bytes(length) + content[where + length :]
    if kind == "double":
        return content[:where] + content[max(0, where - length) :]
    return content[:where] + rng.randbytes(length) + content[where:]


DROPPED = object()


def each_part_forged(whole, places, wrong):
    """Drop or replace by every second of ``wrong`` up to 16 parts of each of the ``places`` of a dict, one at a time:
    yields (the part's place, its value, the forged dict). The next part is replaced by the others of ``wrong``.
    """
    for place in places:
        keys = list(functools.reduce(dict.__getitem__, place, whole))
        for number, key in enumerate(keys[:: max(1, len(keys) // 8)]):
            for value in [DROPPED, *wrong][number % 2 :: 2]:
                yield [*place, key], value, forged(whole, [*place, key], value)


def forged(whole, place, value):
    """The nested dict ``whole`` with ``value`` at ``place``; the parts beside it are the same objects."""
    first, *rest = place
    changed = dict(whole)
    if rest:
        changed[first] = forged(whole[first], rest, value)
    elif value is DROPPED:
        del changed[first]
    else:
        changed[first] = value
    return changed


def outcome(result: Path) -> list[Any]:
    """The curve, the matrix and the losses of a ``result.json``."""
    content = json.loads(result.read_text())
    return [content[name] for name in ("curve", "matrix", "train_loss")]
