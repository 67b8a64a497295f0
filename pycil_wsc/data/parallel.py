"""Work on many image files in processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from tqdm import tqdm

CHUNK = 64  # items that a process takes at a time; to start processes for fewer would take longer than the work


def process_pool(workers: int, items: int) -> contextlib.AbstractContextManager[ProcessPoolExecutor | None]:
    """A pool of ``workers`` processes; None without workers, and for few ``items``."""
    return ProcessPoolExecutor(workers, get_context("spawn")) if workers and items > CHUNK else contextlib.nullcontext()


def map_parts(
    work: Callable[[Any], Any], items: Sequence[Any] | np.ndarray, pool: ProcessPoolExecutor | None, description: str
) -> Iterator[Any]:
    """Yield ``work(part)`` for each ``CHUNK`` of ``items``, in order, from the processes of ``pool`` (None: this one).

    Raises what a process raised; parts that were not begun are then left out.
    """
    parts = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    if pool is None:
        yield from map(work, parts)
        return
    yield from tqdm(pool.map(work, parts), desc=description, total=len(parts), leave=False)
