"""Class order and task split, as PyCIL has them."""

from dataclasses import dataclass

import numpy as np

from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError


@dataclass(frozen=True)
class Task:
    """One step of the sequence. Classes are counted in the order in which they are learned.

    ``num_old`` classes were learned before, ``num_seen`` will be known after. ``train_indices`` are the new classes'
    training samples, by class and then in the data set's order; ``test_indices`` the test samples of all classes seen.
    """

    index: int
    num_old: int
    num_seen: int
    train_indices: np.ndarray
    test_indices: np.ndarray

    @property
    def num_new(self) -> int:
        return self.num_seen - self.num_old


class DataManager:
    """``tasks``, and the targets renumbered so that class k is the k-th to be learned.

    With ``shuffle``, the order is numpy's legacy permutation for ``seed`` (so seed 1993 gives PyCIL's order); without,
    the data set's own. The first task has ``init_cls`` classes, each later one ``increment``, the last what remains.
    """

    def __init__(self, dataset: Dataset, shuffle: bool, seed: int, init_cls: int, increment: int) -> None:
        num_classes = dataset.info.num_classes
        if init_cls > num_classes:
            raise UserError(
                f"init_cls {init_cls} is more than the {num_classes} classes of '{dataset.info.name}'; make it smaller"
            )
        order = np.random.RandomState(seed).permutation(num_classes) if shuffle else np.arange(num_classes)
        self.class_order = order.tolist()
        position = np.argsort(order)
        self.train_targets = position[dataset.train.targets]
        self.test_targets = position[dataset.test.targets]
        self.boundaries = [0, *range(init_cls, num_classes, increment), num_classes]
        self.tasks = [self._task(index) for index in range(len(self.boundaries) - 1)]

    def _task(self, index):
        old, seen = self.boundaries[index : index + 2]
        return Task(index, old, seen, _select(self.train_targets, old, seen), _select(self.test_targets, 0, seen))


def _select(targets, low, high):
    """Indices of the samples with ``low <= target < high``, by class, then in the data set's order."""
    indices = np.flatnonzero((targets >= low) & (targets < high))
    return indices[np.argsort(targets[indices], kind="stable")]
