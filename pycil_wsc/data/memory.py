"""Exemplar memory: stores indices into the training set, not images."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pycil_wsc.data.tasks import Task

ALL = 2**31 - 1  # exemplars per class: keep every image


class ExemplarMemory:
    """The training samples kept for replay.

    With ``fixed``, each class keeps ``per_class`` exemplars. Otherwise ``total`` exemplars are divided equally among
    the classes seen; as the quota shrinks, a class keeps its first exemplars. ``strategy``:

    * ``herding``: samples whose running mean of normalised features is closest to the class mean (Rebuffi et al.,
      2017);
    * ``random``: a uniform sample of each class;
    * ``reservoir``: a uniform sample of the stream, regardless of class (Vitter, 1985): with ``fixed``, ``per_class``
      times the number of new classes from the task's samples; otherwise ``total`` from all samples seen so far.

    A quota above the size of a class keeps the whole class; 0 keeps nothing. With ``fixed`` and ``per_class``
    :data:`ALL`, all samples are kept and no features are needed. If a task has new samples of a known class,
    ``herding`` and ``random`` choose its exemplars again, from the present exemplars and the new samples.
    """

    strategies = ("herding", "random", "reservoir")

    def __init__(self, fixed: bool, per_class: int, total: int, strategy: str) -> None:
        self.fixed, self.per_class, self.total, self.strategy = fixed, per_class, total, strategy
        self.classes = {}  # class -> indices of its exemplars, most important first
        self.seen = 0  # number of samples of all tasks so far

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))

    @property
    def indices(self) -> np.ndarray:
        """The indices of all exemplars, sorted by class: int64 (n,)."""
        return np.concatenate([np.empty(0, np.int64), *(self.classes[c] for c in sorted(self.classes))])

    def quota(self, num_seen: int) -> int:
        return self.per_class if self.fixed else self.total // num_seen

    def update(
        self,
        task: Task,
        targets: np.ndarray,
        features: Callable[[np.ndarray], np.ndarray] | None,
        rng: np.random.Generator,
        map_classes: Callable[..., Iterable[np.ndarray]] = map,
    ) -> None:
        """Choose exemplars of the classes in ``task``, and reduce those of the other classes to the present quota.

        A reservoir with ``fixed`` keeps the other classes as they are.

        Args:
            task: the task just learned.
            targets: (N,), the targets of the whole training set.
            features: maps indices to features, float32 (n, d). Called once, and only for herding.
            rng: source of the random numbers.
            map_classes: herds the classes, like ``map``; several processes can share them out.
        """
        if self.strategy == "reservoir":
            self._update_reservoir(task, targets, rng)
        else:
            self._update_classes(task, targets, features, rng, map_classes)
        self.seen += len(task.train_indices)

    def _update_classes(self, task, targets, features, rng, map_classes):
        quota = self.quota(task.num_seen)
        self.classes = {c: kept[:quota] for c, kept in self.classes.items()}
        candidates = self._candidates(task, targets)
        classes = sorted({*range(task.num_old, task.num_seen), *targets[candidates].tolist()})
        rows = [np.flatnonzero(targets[candidates] == c) for c in classes]
        if quota in (0, ALL):
            picks = [of_class[:quota] for of_class in rows]
        elif self.strategy == "random":
            picks = [rng.permutation(of_class)[:quota] for of_class in rows]
        else:
            assert features is not None, "herding needs features"
            vectors = features(candidates)
            orders = map_classes(lambda of_class: herding(vectors[of_class], quota), rows)
            picks = [of_class[order] for of_class, order in zip(rows, orders)]
        self.classes |= {c: candidates[chosen] for c, chosen in zip(classes, picks)}

    def _candidates(self, task, targets):
        """The task's samples and the exemplars of their classes, sorted by class, then by index."""
        recurring = set(self.classes) & set(targets[task.train_indices].tolist())
        if not recurring:
            return task.train_indices
        candidates = np.sort(np.concatenate([task.train_indices, *(self.classes[c] for c in recurring)]))
        return candidates[np.argsort(targets[candidates], kind="stable")]

    def _update_reservoir(self, task, targets, rng):
        if self.fixed:
            number = ALL if self.per_class == ALL else self.per_class * task.num_new
            chosen = rng.permutation(task.train_indices)[:number]
            kept = self.classes
        else:
            chosen, kept = _reservoir(self.indices, self.seen, task.train_indices, self.total, rng), {}
        groups = {c: chosen[targets[chosen] == c] for c in range(task.num_seen)}
        self.classes = {c: np.concatenate([kept.get(c, group[:0]), group]) for c, group in groups.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"classes": {c: kept.tolist() for c, kept in self.classes.items()}, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.classes = {c: np.array(kept, np.int64) for c, kept in state["classes"].items()}
        self.seen = state.get("seen", 0)  # missing in weights saved by earlier versions, which are not trained further


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


def _reservoir(held, seen, stream, capacity, rng):
    """Vitter's algorithm R: update ``held``, a uniform sample of ``seen`` items, with the items of ``stream``, in
    random order.
    """
    held = list(held if len(held) <= capacity else rng.permutation(held)[:capacity])
    for count, item in enumerate(rng.permutation(stream), start=seen + 1):
        if len(held) < capacity:
            held.append(item)
        elif (slot := rng.integers(count)) < capacity:
            held[slot] = item
    return np.array(held, np.int64)
