"""The C library's memory on the CPU: kept between steps, returned between runs. Without glibc nothing changes."""

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def keep_freed_memory(device: "torch.device") -> None:
    """On the CPU, let the C library keep freed memory, so that the next step's tensors reuse it.

    By default glibc gives large blocks back to the system, which clears every page again when the next step asks for
    them. A GPU's memory is kept by torch.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if device.type == "cpu" and mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap is never cut


def return_freed_memory() -> None:
    """Return free memory to the system; a forked process would otherwise hold a copy of it."""
    if malloc_trim := getattr(_libc(), "malloc_trim", None):
        malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
