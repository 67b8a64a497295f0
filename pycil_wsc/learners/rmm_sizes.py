"""The sizes of RMM's memory (Liu et al., 2021): how many images a task trains on, and how many exemplars there are."""

from collections.abc import Sequence

import numpy as np

from pycil_wsc import seeding
from pycil_wsc.data.tasks import Task, TaskSequence
from pycil_wsc.learners.options import LearnerConfig


def rate_of(rates: Sequence[float], task: Task) -> float:
    return rates[min(task.index, len(rates) - 1)]


def drawn(config: LearnerConfig, task: Task, targets: np.ndarray) -> np.ndarray:
    """The images of ``task`` that it trains on, drawn with replacement as in PyCIL, but one of each class at least.

    The first task, and one with rate 0, trains on all. Sorted by class: int64 (n,). ``targets``: of the training set.
    """
    rate = rate_of(config.options.m_rate_list, task)
    if not task.index or not rate:
        return task.train_indices
    rng = np.random.default_rng(seeding.derived_seed(config.seed, "new samples", task.index))
    labels, parts = targets[task.train_indices], []
    for label in np.unique(labels):
        own = task.train_indices[labels == label]
        number = max(1, int((1 - rate) * len(own)))
        parts.append(own[np.sort(rng.integers(len(own), size=number))])
    return np.concatenate(parts)


def memory_size(config: LearnerConfig, task: Task, manager: TaskSequence) -> int:
    """The number of exemplars after ``task``: the memory's keys, and a fraction of the images of ``increment`` classes.

    With ``tasks``, the rate and the images are the task's own. Else, as in PyCIL, a rate of 0 keeps the previous size,
    and a class counts as the largest of the training set.
    """
    usual = config.memory_per_class * task.num_seen if config.fixed_memory else config.memory_size
    if config.tasks:
        return usual + int(rate_of(config.options.m_rate_list, task) * len(task.train_indices))
    rated = [each for each in manager.tasks[: task.index + 1] if rate_of(config.options.m_rate_list, each)]
    if not rated:
        return usual
    rate = rate_of(config.options.m_rate_list, rated[-1])
    largest = largest_class(manager)
    return min(rated[-1].num_seen * largest - 1, usual + int(rate * config.increment * largest))


def largest_class(manager: TaskSequence) -> int:
    return int(np.bincount(manager.train_targets).max())


def shares(config: LearnerConfig, task: Task, manager: TaskSequence, above: np.ndarray) -> list[int]:
    """The number of exemplars of each class seen; ``above``: bool (new classes,), its mean loss is above the median."""
    equal = memory_size(config, task, manager) // task.num_seen
    rate, largest = rate_of(config.options.c_rate_list, task), largest_class(manager)
    fewer, more = (min(largest, int(equal * factor)) for factor in (1 - rate, 1 + rate))
    return [equal] * task.num_old + [fewer if each else more for each in above]
