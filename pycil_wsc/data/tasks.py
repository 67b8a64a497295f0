"""The tasks of a run: which classes and samples each brings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError


@dataclass(frozen=True)
class Task:
    """One step of the sequence. Classes are counted in the order in which they are learned.

    ``num_old`` classes were learned before, ``num_seen`` will be known after. ``train_indices`` are the training
    samples that the task brings, by class and then in the data set's order; ``test_indices`` the test samples of all
    tasks so far.
    """

    index: int
    num_old: int
    num_seen: int
    train_indices: np.ndarray
    test_indices: np.ndarray

    @property
    def num_new(self) -> int:
        return self.num_seen - self.num_old


class TaskSequence:
    """``tasks`` over samples each of which arrives with one of them.

    Args:
        class_order: the data set's label of the k-th class to be learned.
        boundaries: 0, then the number of classes known after each task.
        train_targets, test_targets: (N,), (M,) classes in learning order.
        train_tasks, test_tasks: (N,), (M,) the task with which a sample arrives, counted from 0.
    """

    def __init__(
        self,
        class_order: list[int],
        boundaries: Sequence[int],
        train_targets: np.ndarray,
        test_targets: np.ndarray,
        train_tasks: np.ndarray,
        test_tasks: np.ndarray,
    ) -> None:
        self.class_order, self.boundaries = class_order, list(boundaries)
        self.train_targets, self.test_targets = train_targets, test_targets
        self.train_tasks, self.test_tasks = train_tasks, test_tasks
        self.tasks = [self._task(index) for index in range(len(self.boundaries) - 1)]

    def first(self, number: int) -> "TaskSequence":
        """The same without the tasks after the first ``number`` of them, and without the classes of those."""
        number = min(number, len(self.tasks))
        self.tasks, self.boundaries = self.tasks[:number], self.boundaries[: number + 1]
        self.class_order = self.class_order[: self.boundaries[-1]]
        return self

    def _task(self, index):
        old, seen = self.boundaries[index : index + 2]
        train = _by_class(np.flatnonzero(self.train_tasks == index), self.train_targets)
        return Task(index, old, seen, train, _by_class(np.flatnonzero(self.test_tasks <= index), self.test_targets))


class DataManager(TaskSequence):
    """The classes of a data set, split into tasks as PyCIL splits them.

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
        position = np.argsort(order)
        targets = [position[split.targets] for split in (dataset.train, dataset.test)]
        boundaries = [0, *range(init_cls, num_classes, increment), num_classes]
        tasks = [np.searchsorted(boundaries, each, side="right") - 1 for each in targets]  # those of their classes
        super().__init__(order.tolist(), boundaries, *targets, *tasks)


class TaskStream(TaskSequence):
    """Tasks that bring their own images: of new classes, of known ones, or of both (:mod:`pycil_wsc.data.stream`).

    ``dataset`` has ``arrivals``, and its classes in learning order.
    """

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.arrivals is not None
        order, train, test = list(range(dataset.info.num_classes)), dataset.train.targets, dataset.test.targets
        super().__init__(order, [0, *dataset.arrivals.seen], train, test, dataset.arrivals.train, dataset.arrivals.test)


def tasks_of(dataset: Dataset, config: Any) -> TaskSequence:
    """The tasks of a run: those of its stream, or its data set's classes split as the configuration says."""
    if dataset.arrivals is not None:
        sequence = TaskStream(dataset)
    else:
        sequence = DataManager(dataset, config.shuffle, config.seed, config.init_cls, config.increment)
    return sequence if config.max_tasks is None else sequence.first(config.max_tasks)


def _by_class(indices, targets):
    """``indices`` by class, then in their own order."""
    return indices[np.argsort(targets[indices], kind="stable")]
