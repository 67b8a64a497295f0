"""Images of a task that are held out from training, on which probabilities are calibrated and updates judged."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pycil_wsc.classifier.predict.images import Transform, chunks
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping
from pycil_wsc.classifier.store.hashes import digests_of
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.seeding import derived_seed

ONE_OF = 5  # at most every fifth image of a class is held out


def unseen_in(
    digests: np.ndarray, relearned: np.ndarray, bookkeeping: Bookkeeping, hashes: Mapping[str, str]
) -> np.ndarray:
    """The images of a task that no task has trained on, this one included, which may have one twice: bool (N,).

    Args:
        digests: of the images (:func:`~pycil_wsc.classifier.store.hashes.digests_of`).
        relearned: rows of those that were learned with another class.
        bookkeeping: what was learned, and the images held out, of which one may come again with another class.
        hashes: the SHA-256 of the image files.
    """
    relabelled = np.isin(digests, digests_of(bookkeeping.held_out, hashes))
    _, place, times = np.unique(digests, return_inverse=True, return_counts=True)
    unseen = (times[place] == 1) & ~np.isin(digests, bookkeeping.learned) & ~relabelled
    unseen[relearned] = False
    return unseen


def set_aside(
    part: Dataset, unseen: np.ndarray, counts: Mapping[str, int], per_class: int, seed: int, task: int
) -> np.ndarray:
    """Hold out images of a task, at random, until there are ``per_class`` of each class.

    At most a fifth of a class's images are taken, so that a small class is trained on.

    Args:
        part: the task's images.
        unseen: bool (N,), which of them may be held out: no task has trained on them.
        counts: class -> the number of its images that are held out already.
        per_class: how many there should be.
        seed: of the random choice, with ``task``, which is counted from 0.

    Returns:
        The images that are held out: bool (N,).
    """
    rng = np.random.default_rng(derived_seed(seed, "held out", task))
    taken = np.zeros(len(part.train), bool)
    for label, name in enumerate(part.info.classes):
        rows = rng.permutation(np.flatnonzero(part.train.targets == label))
        wanted = max(0, per_class - counts.get(name, 0))
        free = rows[unseen[rows]]
        taken[free[: min(wanted, len(rows) // ONE_OF)]] = True
    return taken


def check_usable(split: Split, info: DatasetInfo) -> None:
    """Raise a :class:`UserError` for images that cannot be classified: now, rather than after the training."""
    if split.in_memory:
        list(chunks(split.images[:1], Transform(info), 1))  # all have one size
        return
    for path in split.images.tolist():
        decode(path)


def rows_of(split: Split, rows: np.ndarray) -> Split:
    """The images of these ``rows``."""
    return Split(split.images[rows], split.targets[rows])
