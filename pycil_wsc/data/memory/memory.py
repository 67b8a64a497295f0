"""Exemplar memory: stores indices into the training set, not images."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycil_wsc import registry
from pycil_wsc.data.data_options import ALL
from pycil_wsc.data.memory.values import ExemplarValues
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.state import State


class ExemplarMemory:
    """The training samples kept for replay.

    With ``fixed``, each class keeps ``per_class`` exemplars. Otherwise ``total`` exemplars are divided equally among
    the classes seen; as the quota shrinks, a class keeps its first exemplars. ``strategy`` names the registered choice
    (:mod:`.choices`). ``capacity``: number of classes seen -> number of exemplars to divide, if less than ``total``
    fit, since something is stored with each: ``stored``, whose values are on the ``device``.

    A quota above the size of a class keeps the whole class; 0 keeps nothing. If all samples are kept, nothing is
    chosen, and no features are needed. If a task has new samples of a known class, a choice by class chooses its
    exemplars again, from the present exemplars and the new samples.
    """

    def __init__(
        self,
        fixed: bool,
        per_class: int,
        total: int,
        strategy: str,
        capacity: Callable[[int], int] | None = None,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self.fixed, self.per_class, self.total, self.strategy = fixed, per_class, total, strategy
        self._capacity = capacity
        self._classes: dict[int, np.ndarray] = {}
        self.seen = 0  # number of samples of all tasks so far
        self.seen_by_class: dict[int, int] = {}  # class -> the number of its samples so far
        self.tasks = 0  # number of tasks whose exemplars are chosen
        self.stored: Any = ExemplarValues(device)  # `SlotValues` in a memory that steps fill

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))

    @property
    def classes(self) -> dict[int, np.ndarray]:
        """Class -> indices of its exemplars, most important first."""
        return self._classes

    @classes.setter
    def classes(self, chosen: dict[int, np.ndarray]) -> None:
        self._classes = chosen

    @property
    def indices(self) -> np.ndarray:
        """The indices of all exemplars, sorted by class: int64 (n,)."""
        return np.concatenate([np.empty(0, np.int64), *(self.classes[c] for c in sorted(self.classes))])

    def before(self, task: Task) -> np.ndarray:
        """The exemplars of tasks before ``task``, of which some may have been chosen already: indices (n,)."""
        return self.indices[~np.isin(self.indices, task.train_indices)]

    def capacity(self, num_seen: int) -> int:
        """The number of exemplars in all, if it is divided among ``num_seen`` classes."""
        return self._capacity(num_seen) if self._capacity else self.total

    def quota(self, num_seen: int) -> int:
        return self.per_class if self.fixed else self.capacity(num_seen) // num_seen

    def update(
        self,
        task: Task,
        targets: np.ndarray,
        features: Callable[[np.ndarray], np.ndarray] | None,
        rng: np.random.Generator,
        map_classes: Callable[..., Iterable[np.ndarray]] = map,
        quotas: Sequence[int] | None = None,
    ) -> None:
        """Choose exemplars of the classes in ``task``, and reduce those of the other classes to their present quota.

        A choice that is not by class, such as a reservoir, decides about all classes itself.

        Args:
            task: the task just learned.
            targets: (N,), the targets of the whole training set.
            features: maps indices to features, float32 (n, d). Called only by a choice that uses them, such as herding.
            rng: source of the random numbers.
            map_classes: chooses for the classes, like ``map``; several processes can share them out.
            quotas: the number of exemplars of each class seen; None: equally many, as the keys say.
        """
        choice = registry.exemplars[self.strategy]
        numbers = [self.quota(task.num_seen)] * task.num_seen if quotas is None else list(quotas)
        kept = {}
        if choice.by_class:
            kept = {c: held[: numbers[c]] for c, held in self.classes.items()}
            self.classes = kept
        candidates = self._candidates(task, targets) if choice.by_class else task.train_indices
        classes = sorted({*range(task.num_old, task.num_seen), *targets[candidates].tolist()})
        wanted = {c: numbers[c] for c in classes}
        pool = Pool(self, task, targets, candidates, wanted, rng, features, map_classes)
        if choice.by_class and set(wanted.values()) <= {0, ALL}:
            chosen = pool.of_each_class(lambda rows, quota: rows[:quota], shared=False)
        else:
            chosen = choice.choose(pool)
        self.classes = kept | chosen
        self.seen += len(task.train_indices)
        for label, number in zip(*np.unique(targets[task.train_indices], return_counts=True)):
            self.seen_by_class[int(label)] = self.seen_by_class.get(int(label), 0) + int(number)
        self.tasks = task.index + 1
        self.stored.keep(self.indices)

    def counting(self) -> ExemplarMemory:
        """A copy that holds as many exemplars of each class, but needs no features: by class, it draws them."""
        strategy = "random" if registry.exemplars[self.strategy].by_class else self.strategy
        memory = ExemplarMemory(self.fixed, self.per_class, self.total, strategy, self._capacity)
        memory.load_state_dict(self.state_dict())
        return memory

    def _candidates(self, task, targets):
        """The task's samples and the exemplars of their classes, sorted by class, then by index."""
        recurring = set(self.classes) & set(targets[task.train_indices].tolist())
        if not recurring:
            return task.train_indices
        candidates = np.sort(np.concatenate([task.train_indices, *(self.classes[c] for c in recurring)]))
        return candidates[np.argsort(targets[candidates], kind="stable")]

    def state_dict(self) -> State:
        classes = {c: kept.tolist() for c, kept in self.classes.items()}
        by_class = dict(self.seen_by_class)
        return {"classes": classes, "seen": self.seen, "seen_by_class": by_class, "tasks": self.tasks}

    def load_state_dict(self, state: State) -> None:
        self.classes = {c: np.array(kept, np.int64) for c, kept in state["classes"].items()}
        self.seen = state.get("seen", 0)  # 0.1.0 has none, as the next two; its learners chose at their task's end
        self.seen_by_class = dict(state.get("seen_by_class", {}))
        self.tasks = state.get("tasks", 0)

    @staticmethod
    def renumbered(state: State, numbers: np.ndarray) -> State:
        """The ``state_dict`` where sample ``i`` has become ``numbers[i]``, or was dropped if that is negative."""
        classes = {}
        for label, kept in state["classes"].items():
            new = numbers[np.array(kept, np.int64)]
            classes[label] = new[new >= 0].tolist()
        return {**state, "classes": classes}


def regrouped(state: State, groups: Sequence[Sequence[int]]) -> State:
    """The ``state_dict`` of a memory after classes were merged: class ``new`` has the exemplars of ``groups[new]``.

    They take turns, so that a smaller quota keeps some of each. Classes in no group must have no exemplars left.
    """
    classes, seen_by_class = {}, {}
    for new, group in enumerate(groups):
        parts = [state["classes"][label] for label in group if label in state["classes"]]
        if parts:
            turns = itertools.zip_longest(*parts)
            classes[new] = [index for turn in turns for index in turn if index is not None]
        counts = [state["seen_by_class"][label] for label in group if label in state["seen_by_class"]]
        if counts:
            seen_by_class[new] = sum(counts)
    gone = sum(state["seen_by_class"].values()) - sum(seen_by_class.values())
    changed = {**state, "classes": classes, "seen": state["seen"] - gone, "seen_by_class": seen_by_class}
    if "slots" in state:  # of a memory that steps fill
        number = {label: new for new, group in enumerate(groups) for label in group}
        full = {number[label] for label in state["full"] if label in number}
        changed |= {"labels": [number[label] for label in state["labels"]], "full": sorted(full)}
    return changed


@dataclass(frozen=True, eq=False)
class Pool:
    """What exemplars are chosen from, after a task.

    Args:
        memory: the exemplars so far, with the keys that limit them.
        task: the task just learned.
        targets: (N,), of the whole training set.
        indices: (n,), the candidates, sorted by class: the task's samples, and the exemplars of classes that recur.
        quotas: class -> the number of its exemplars, for the classes of the candidates.
        rng: source of the random numbers, the same in all processes.
        features: indices -> float32 (n, d).
        map_classes: like ``map``; several processes share the work.
    """

    memory: ExemplarMemory
    task: Task
    targets: np.ndarray
    indices: np.ndarray
    quotas: dict[int, int]
    rng: np.random.Generator
    features: Callable[[np.ndarray], np.ndarray] | None
    map_classes: Callable[..., Iterable[np.ndarray]] = map

    def rows(self, label: int) -> np.ndarray:
        """The candidates of a class: their positions in ``indices``, int64 (k,)."""
        return np.flatnonzero(self.labels == label)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """The class of each of ``indices``: int64 (n,)."""
        return self.targets[self.indices]

    def of_each_class(
        self, pick: Callable[[np.ndarray, int], np.ndarray], shared: bool = True
    ) -> dict[int, np.ndarray]:
        """Class -> its exemplars, most important first: the candidates whose positions ``pick(rows, quota)`` returns.

        ``shared``: processes share the classes. ``pick`` must then draw no number from ``rng``.
        """
        work = list(self.quotas.items())
        picks = (self.map_classes if shared else map)(lambda item: pick(self.rows(item[0]), item[1]), work)
        return {label: self.indices[rows] for (label, _), rows in zip(work, picks)}
