"""The C library's memory on the CPU: kept between steps, returned between runs. Elsewhere than with glibc, nothing changes."""

import ctypes
import sys


def keep_freed_memory(device):
    """On the CPU, let the C library keep what is freed: a step's tensors are then made of the last step's memory.

    By itself glibc gives large blocks back to the system, which clears every page again when the next step asks for them. A GPU's
    memory is kept by torch.
    """
    if device.type == "cpu" and hasattr(_libc(), "mallopt"):
        _libc().mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        _libc().mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap is never cut


def return_freed_memory():
    """Give what is free now back to the system: a process that is forked would otherwise hold a copy of it."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def _libc():
    return ctypes.CDLL(None) if sys.platform == "linux" else None
