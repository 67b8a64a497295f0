"""The C library's allocator on the CPU: keeps freed memory between steps, returns it between runs (glibc only)."""

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
        mallopt(-4, 0)  # M_MMAP_MAX: do not map large blocks separately
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap


def free_memory() -> None:
    """Return free memory to the system, now and from now on, as the C library does by default."""
    if mallopt := getattr(_libc(), "mallopt", None):
        mallopt(-4, 65536)
        mallopt(-1, 128 * 1024)
    return_freed_memory()


def return_freed_memory() -> None:
    """Return free memory to the system; a forked process would otherwise hold a copy of it."""
    if malloc_trim := getattr(_libc(), "malloc_trim", None):
        malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
