"""Random numbers by address.

Each use of randomness has an address, such as ``(seed, "batches", task, phase, epoch)``, and draws from a generator
seeded by it. A run can therefore be resumed without saved generator states, and drawing more numbers in one place does
not affect others. An address and the same one followed by 0 have equal seeds: use one of the two.
"""

import contextlib
import os
import threading
import zlib
from collections.abc import Iterator

import numpy as np
import torch


def lock_of_threads() -> threading.RLock:
    """A lock that is free in a process that is forked while another thread holds it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


_IN_USE = lock_of_threads()  # the threads of a process share torch's global generators


def derived_seed(seed: int, *address: str | int) -> int:
    """A 63-bit seed for ``address``, a sequence of strings and non-negative integers."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in address]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(seed: int, *address: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator on ``device``, seeded by address."""
    return torch.Generator(device).manual_seed(derived_seed(seed, *address))


@contextlib.contextmanager
def seeded(seed: int, *address: str | int, device: torch.device = torch.device("cpu")) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of ``device`` by address; they are restored on exit.

    Another thread that does so too waits until then.
    """
    accelerators = [] if device.type == "cpu" else [device]
    with restored(accelerators, device.type):
        torch.random.default_generator.manual_seed(derived_seed(seed, *address))
        for accelerator in accelerators:
            # no function of torch seeds one of several without making it the current one
            state = generator(seed, *address, device=accelerator).get_state()
            torch.get_device_module(accelerator).set_rng_state(state, accelerator)
        yield


@contextlib.contextmanager
def restored(devices: list[torch.device], device_type: str = "cpu") -> Iterator[None]:
    """Restore torch's global generators of the CPU and of ``devices`` on exit. Only one thread at a time is inside."""
    with _IN_USE, torch.random.fork_rng(devices=devices, device_type=device_type):
        yield
