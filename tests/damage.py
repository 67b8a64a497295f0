"""Files with a flipped bit."""

import random


def a_bit_flipped(content, position, bit=2):
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def each_with_a_bit_flipped(path, number):
    """Flip a bit of the file at ``path``, ``number`` times, each at another position, which is yielded."""
    whole, chance = path.read_bytes(), random.Random(0)
    for position in chance.sample(range(len(whole)), number):
        path.write_bytes(a_bit_flipped(whole, position, chance.randrange(8)))
        yield position
