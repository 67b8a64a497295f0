"""Random numbers by address.

Each use of randomness has a name within its run, ``(seed, "batches", task, phase, epoch)`` for example, and draws from a
generator seeded by that address. So nothing has to be saved to go on after a kill, and asking for more in one place
changes nothing in another.
"""

import contextlib
import zlib

import numpy as np
import torch


def derived_seed(seed, *address):
    """A 63-bit seed for ``address``, a sequence of strings and non-negative integers."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in address]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(seed, *address, device="cpu"):
    """A torch generator on ``device``, seeded by address."""
    return torch.Generator(device).manual_seed(derived_seed(seed, *address))


@contextlib.contextmanager
def seeded(seed, *address):
    """Within, torch's global generator is seeded by address (initial weights draw from it); after, it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(derived_seed(seed, *address))
        yield
