"""The host's memory: how much is free, and the C library's allocator.

That keeps freed memory between steps and returns it between runs (glibc only).
"""

import contextlib
import ctypes
import sys
from pathlib import Path
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


def free_host_memory() -> float:
    """Bytes that this process can still take of the host's memory and swap; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        free = 1024.0 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])
    except (OSError, ValueError, LookupError):  # not Linux
        return float("inf")
    group = Path("/sys/fs/cgroup")  # of a container
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", as it has no limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached.get("inactive_file", 0)))
    return free


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
