"""Which samples become exemplars. To add a choice, register it in a file of this folder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pycil_wsc.data.tasks import Task
from pycil_wsc.registry import register_exemplars

if TYPE_CHECKING:
    from pycil_wsc.data.memory import ExemplarMemory

ALL = 2**31 - 1  # exemplars per class: keep every image


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

    memory: "ExemplarMemory"
    task: Task
    targets: np.ndarray
    indices: np.ndarray
    quotas: dict[int, int]
    rng: np.random.Generator
    features: Callable[[np.ndarray], np.ndarray] | None
    map_classes: Callable[..., Iterable[np.ndarray]] = map

    def rows(self, label: int) -> np.ndarray:
        """The candidates of a class: their places in ``indices``."""
        return np.flatnonzero(self.targets[self.indices] == label)

    def of_each_class(self, pick: Callable[[np.ndarray, int], np.ndarray], shared: bool = True) -> dict[int, Any]:
        """Class -> its exemplars, most important first: the candidates whose places ``pick(rows, quota)`` returns.

        ``shared``: processes share the classes. ``pick`` must then draw no number from ``rng``.
        """
        work = list(self.quotas.items())
        picks = (self.map_classes if shared else map)(lambda item: pick(self.rows(item[0]), item[1]), work)
        return {label: self.indices[rows] for (label, _), rows in zip(work, picks)}


@register_exemplars("herding")
def herd(pool: Pool) -> dict[int, np.ndarray]:
    """Samples whose running mean of normalised features is closest to the class mean (Rebuffi et al., 2017)."""
    assert pool.features is not None, "herding needs features"
    vectors = pool.features(pool.indices)
    return pool.of_each_class(lambda rows, quota: rows[herding(vectors[rows], quota)])


@register_exemplars("random")
def draw(pool: Pool) -> dict[int, np.ndarray]:
    """A uniform sample of each class."""
    return pool.of_each_class(lambda rows, quota: pool.rng.permutation(rows)[:quota], shared=False)


@register_exemplars("reservoir", by_class=False)
def sample_the_stream(pool: Pool) -> dict[int, np.ndarray]:
    """A uniform sample of the stream, regardless of class (Vitter, 1985).

    With ``fixed_memory``, ``memory_per_class`` times the number of new classes from the task's samples; otherwise
    ``memory_size`` from all samples seen so far.
    """
    memory, task, targets = pool.memory, pool.task, pool.targets
    if memory.fixed:
        number = ALL if memory.per_class == ALL else memory.per_class * task.num_new
        chosen, kept = pool.rng.permutation(task.train_indices)[:number], memory.classes
    else:
        chosen = reservoir(memory.indices, memory.seen, task.train_indices, memory.total, pool.rng)
        kept = {}
    groups = {c: chosen[targets[chosen] == c] for c in range(task.num_seen)}
    return {c: np.concatenate([kept.get(c, group[:0]), group]) for c, group in groups.items()}


def normalise(features: np.ndarray) -> np.ndarray:
    """Scale rows to unit length, adding 1e-8 to the length as in PyCIL: (n, d)."""
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-8)


def herding(features: np.ndarray, quota: int) -> np.ndarray:
    """Greedily pick samples so that the mean of their normalised features is closest to the class mean.

    ``features``: (n, d) of one class. Returns min(quota, n) distinct row numbers in the order of choice; ties are
    broken by position. Source: Rebuffi et al., 2017.
    """
    features = normalise(features)
    mean = features.mean(0)
    total = np.zeros_like(mean)
    taken = np.zeros(len(features), bool)
    picks = []
    for k in range(1, min(quota, len(features)) + 1):
        distance = np.sqrt((((features + total) / k - mean) ** 2).sum(1))
        distance[taken] = np.inf
        pick = int(distance.argmin())
        total = total + features[pick]
        taken[pick] = True
        picks.append(pick)
    return np.array(picks, np.int64)


def reservoir(held: np.ndarray, seen: int, stream: np.ndarray, capacity: int, rng: np.random.Generator) -> np.ndarray:
    """Vitter's algorithm R: update ``held``, a uniform sample of ``seen`` items, with the items of ``stream``, in
    random order.
    """
    chosen = list(held if len(held) <= capacity else rng.permutation(held)[:capacity])
    for count, item in enumerate(rng.permutation(stream), start=seen + 1):
        if len(chosen) < capacity:
            chosen.append(item)
        elif (slot := rng.integers(count)) < capacity:
            chosen[slot] = item
    return np.array(chosen, np.int64)
