"""Work on many image files in processes."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from pycil_wsc.errors import UserError

U = TypeVar("U")
CHUNK = 64  # items that a process takes at a time; to start processes for fewer would take longer than the work
START_METHOD = "spawn"  # a fork would inherit threads and the CUDA context


def at_most_one_per_core(workers: int) -> int:
    """``workers``, but no more than there are cores: further processes only take turns."""
    return min(workers, cores())


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_pool(workers: int, items: int) -> contextlib.AbstractContextManager[ProcessPoolExecutor | None]:
    """A pool of ``workers`` processes; None without workers, and for few ``items``."""
    if not workers or items <= CHUNK:
        return contextlib.nullcontext()
    return ProcessPoolExecutor(at_most_one_per_core(workers), get_context(START_METHOD), _can_be_ended)


def _can_be_ended() -> None:
    """Take SIGTERM, which a worker of a sweep has blocked: with it the pool ends the others if one has died."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def map_parts(
    work: Callable[..., U], items: Sequence[object] | np.ndarray, pool: ProcessPoolExecutor | None, description: str
) -> Iterator[U]:
    """Yield ``work(part)`` for each ``CHUNK`` of ``items``, in order, from the processes of ``pool`` (None: this one).

    Raises what a process raised; parts that were not begun are then left out. Raises a :class:`UserError` if a process
    ended by itself: each one imports the main script first, which without a guard starts processes of its own.
    """
    parts = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    if pool is None:
        yield from map(work, parts)
        return
    try:
        yield from tqdm(pool.map(work, parts), desc=description, total=len(parts), leave=False)
    except BrokenProcessPool:
        raise worker_ended(description) from None


def worker_ended(description: str) -> UserError:
    """The error that tells what to do if a process that imports the main script has ended by itself."""
    return UserError(
        f"{description}: a worker process ended unexpectedly; put the code of your script below "
        "`if __name__ == '__main__':`, or set num_workers to 0 (if it was killed, free memory)"
    )
