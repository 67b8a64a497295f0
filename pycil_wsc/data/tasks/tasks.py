"""The tasks of a run, with their classes and samples."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pycil_wsc.data.data_options import SeededTasks
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError, plural
from pycil_wsc.seeding import derived_seed

MOST_SHOWN = 20  # tasks in a line


@dataclass(frozen=True)
class Task:
    """One step of the sequence. Classes are numbered in the order in which they are learned.

    ``num_old`` classes are known before the task, ``num_seen`` after it. ``train_indices`` are the task's training
    samples, sorted by class and then in the data set's order; ``test_indices`` are the test samples of all tasks so
    far. ``num_later`` classes are known to come after it: none if tasks may still be added.
    """

    index: int
    num_old: int
    num_seen: int
    train_indices: np.ndarray
    test_indices: np.ndarray
    num_later: int = 0

    @property
    def num_new(self) -> int:
        return self.num_seen - self.num_old


class TaskSequence:
    """A sequence of tasks; each sample belongs to one of them.

    Args:
        class_order: the data set's labels in learning order.
        boundaries: 0, then the number of classes known after each task.
        train_targets: (N,), classes numbered in learning order.
        test_targets: (M,), likewise.
        train_tasks: (N,), the task of each sample, counted from 0.
        test_tasks: (M,), likewise.
    """

    counted = "classes"  # what a task brings, in words
    open_ended = False  # whether tasks may be added to a finished run

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
        self.relearned = np.empty((0, 2), np.int64)  # as in :class:`~pycil_wsc.data.types.Arrivals`
        self.tasks = self._tasks()

    def first(self, number: int) -> "TaskSequence":
        """Keep only the first ``number`` tasks and their classes; returns the sequence itself."""
        number = min(number, len(self.tasks))
        self.boundaries = self.boundaries[: number + 1]
        self.class_order = self.class_order[: self.boundaries[-1]]
        self.tasks = [replace(task, num_later=self._num_later(task.num_seen)) for task in self.tasks[:number]]
        return self

    def in_words(self) -> str:
        """``3 tasks: 3, 4, 3 classes``; of many tasks the first ones and the last."""
        numbers = [str(task.num_new) for task in self.tasks]
        if len(numbers) > MOST_SHOWN:
            numbers[MOST_SHOWN - 2 : -1] = ["..."]
        return f"{plural(len(self.tasks), 'task')}: {', '.join(numbers)} {self.counted}"

    def largest_class(self) -> int:
        """The number of training images of the largest class."""
        return int(np.bincount(self.train_targets, minlength=1).max())

    def first_class(self, task: Task) -> int:
        """The first class, in learning order, of the task's images: ``num_old`` if all its classes are new."""
        return int(self.train_targets[task.train_indices].min(initial=task.num_old))

    def _tasks(self) -> list[Task]:
        """The tasks, of which a stream may have thousands: their training samples are sorted at once."""
        order = np.lexsort((self.train_targets, self.train_tasks))
        stops = np.searchsorted(self.train_tasks[order], np.arange(len(self.boundaries)))
        test = np.empty(0, np.int64)
        tasks = []
        for index, (old, seen) in enumerate(itertools.pairwise(self.boundaries)):
            train = order[stops[index] : stops[index + 1]]
            if len(self.test_targets):
                test = _by_class(np.flatnonzero(self.test_tasks <= index), self.test_targets)
            tasks.append(Task(index, old, seen, train, test, self._num_later(seen)))
        return tasks

    def _num_later(self, seen):
        return 0 if self.open_ended else self.boundaries[-1] - seen


class DataManager(TaskSequence):
    """The classes of a data set, split into tasks as in PyCIL.

    With ``shuffle``, the class order is numpy's legacy permutation for ``seed`` (so seed 1993 gives PyCIL's order);
    otherwise it is the data set's. The first task has ``init_cls`` classes, each later one ``increment``, and the last
    one the remaining classes; or each task has as many as ``increments`` says.

    ``blurry``: the share of each task's images that change places with those of other tasks (:func:`blurred`). The
    task of a class, and of its test images, stays.
    """

    def __init__(
        self,
        dataset: Dataset,
        shuffle: bool,
        seed: int,
        init_cls: int,
        increment: int,
        increments: Sequence[int] = (),
        blurry: float = 0.0,
    ) -> None:
        num_classes = dataset.info.num_classes
        if increments:
            boundaries = _uneven(increments, dataset)
        elif init_cls > num_classes:
            raise UserError(
                f"init_cls {init_cls} is more than the {num_classes} classes of '{dataset.info.name}'; make it smaller"
            )
        else:
            boundaries = [0, *range(init_cls, num_classes, increment), num_classes]
        order = np.random.RandomState(seed).permutation(num_classes) if shuffle else np.arange(num_classes)
        position = np.argsort(order)
        train_targets = position[dataset.train.targets]
        test_targets = position[dataset.test.targets]
        train_tasks = np.searchsorted(boundaries, train_targets, side="right") - 1
        test_tasks = np.searchsorted(boundaries, test_targets, side="right") - 1
        trained_in = blurred(train_tasks, blurry, seed)
        super().__init__(order.tolist(), boundaries, train_targets, test_targets, trained_in, test_tasks)
        self.train_tasks = train_tasks


def blurred(tasks: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The tasks (N,) of samples, where this ``share`` of each task's, drawn by ``seed``, is divided equally among the
    other tasks.
    """
    number = int(tasks.max(initial=0)) + 1
    changed = tasks.copy()
    if not share or number == 1:
        return changed
    for task in range(number):
        rng = np.random.default_rng(derived_seed(seed, "blurry", task))
        samples = np.flatnonzero(tasks == task)
        given = rng.permutation(samples)[: round(share * len(samples))]
        others = rng.permutation([other for other in range(number) if other != task])
        changed[given] = np.resize(others, len(given))
    return changed


class TaskStream(TaskSequence):
    """Tasks with their own images, of new or known classes (:mod:`pycil_wsc.data.tasks.growing_dataset`).

    ``dataset`` must have ``arrivals``, and its classes in learning order.
    """

    counted = "new classes"
    open_ended = True

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.arrivals is not None
        order, train, test = list(range(dataset.info.num_classes)), dataset.train.targets, dataset.test.targets
        super().__init__(order, [0, *dataset.arrivals.seen], train, test, dataset.arrivals.train, dataset.arrivals.test)
        self.relearned = dataset.arrivals.relearned


def tasks_of(dataset: Dataset, config: SeededTasks) -> TaskSequence:
    """The tasks of a run: those of its stream, or the data set's classes split according to the configuration."""
    if dataset.arrivals is not None:
        sequence = TaskStream(dataset)
    else:
        sizes = config.init_cls, config.increment, config.increments, config.blurry
        sequence = DataManager(dataset, config.shuffle, config.seed, *sizes)
    return sequence if config.max_tasks is None else sequence.first(config.max_tasks)


def _uneven(increments: Sequence[int], dataset: Dataset) -> list[int]:
    """0, then the number of classes known after each task of as many classes as ``increments`` says."""
    boundaries = [0, *itertools.accumulate(increments)]
    given = boundaries[-1]
    available = dataset.info.num_classes
    if given > available:
        raise UserError(
            f"increments: add up to {given}, but '{dataset.info.name}' has {available} classes; make them smaller"
        )
    if given < available:
        raise UserError(
            f"increments: add up to {given} of the {available} classes of '{dataset.info.name}'; make them larger, or "
            f"choose {given} of them with the key classes"
        )
    return boundaries


def _by_class(indices, targets):
    """``indices`` sorted by class; the sort is stable."""
    return indices[np.argsort(targets[indices], kind="stable")]
