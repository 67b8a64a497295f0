"""Which samples become exemplars. To add a choice, register it in a file of this folder."""

import numpy as np

from pycil_wsc.data.memory.memory import Pool
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.registry import register_exemplars


@register_exemplars("herding")
def herd(pool: Pool) -> dict[int, np.ndarray]:
    """Samples whose running mean of normalised features is closest to the class mean (Rebuffi et al., 2017)."""
    assert pool.features is not None, "herding needs features"
    vectors = pool.features(pool.indices)
    return pool.of_each_class(lambda rows, quota: rows[herding(vectors[rows], quota)])


@register_exemplars("herding_raw")
def herd_raw(pool: Pool) -> dict[int, np.ndarray]:
    """As ``herding``, but on features that are not normalised: Mammoth's for LUCIR."""
    assert pool.features is not None, "herding needs features"
    vectors = pool.features(pool.indices)
    vectors = vectors / max(1e-12, np.linalg.norm(vectors, axis=1).max(initial=0))  # the same order
    return pool.of_each_class(lambda rows, quota: rows[nearest_to_mean(vectors[rows], quota)])


@register_exemplars("random")
def draw(pool: Pool) -> dict[int, np.ndarray]:
    """A uniform sample of each class."""
    return pool.of_each_class(lambda rows, quota: pool.rng.permutation(rows)[:quota], shared=False)


@register_exemplars("reservoir", by_class=False)
def sample_the_stream(pool: Pool) -> dict[int, np.ndarray]:
    """A uniform sample of the stream (Vitter, 1985): ``memory_size`` of all samples so far, regardless of class.

    With ``fixed_memory``, each class has a reservoir of its own: ``memory_per_class`` of all samples of the class so
    far. A single reservoir cannot grow with the number of classes: what it has dropped does not come again.
    """
    memory, task, targets = pool.memory, pool.task, pool.targets
    if memory.fixed:
        return {label: _of_its_class(pool, label) for label in range(task.num_seen)}
    capacity = memory.capacity(task.num_seen)
    chosen = reservoir(memory.indices, memory.seen, task.train_indices, capacity, pool.rng)
    labels = targets[chosen]
    order = np.argsort(labels, kind="stable")
    return dict(enumerate(np.split(chosen[order], np.searchsorted(labels[order], np.arange(1, task.num_seen)))))


@register_exemplars("balanced", by_class=False)
def sample_each_class_alike(pool: Pool) -> dict[int, np.ndarray]:
    """Class-balancing reservoir sampling (Chrysakis and Moens, ICML 2020) of ``memory_size`` of all samples so far.

    Small classes are kept whole, the others share what is left equally, and what is kept of a class is a uniform sample
    of it. The samples of a task come in random order.
    """
    memory, task = pool.memory, pool.task
    kept = {label: samples for label, samples in memory.classes.items() if len(samples)}
    slots = StreamMemory(False, 0, memory.capacity(task.num_seen), "balanced")
    slots.slots = np.concatenate([np.empty(0, np.int64), *kept.values()])
    slots.labels = np.repeat(np.array([*kept], np.int64), [len(samples) for samples in kept.values()])
    slots.seen_by_class = dict(memory.seen_by_class)
    slots.full = {label for label, samples in kept.items() if len(samples) < memory.seen_by_class.get(label, 0)}
    _shrink(slots, pool.rng)
    stream = pool.rng.permutation(task.train_indices)
    labels = pool.targets[stream]
    slots.enter(stream, labels, slots.choose(labels, pool.rng))
    return {label: slots.slots[slots.labels == label] for label in range(task.num_seen)}


def _shrink(slots: StreamMemory, rng: np.random.Generator) -> None:
    """Drop samples of the largest classes, at random, while there are more than fit."""
    for _ in range(len(slots) - slots.size):
        counts = np.bincount(slots.labels)
        gone = rng.choice(np.flatnonzero(slots.labels == counts.argmax()))
        slots.full.add(int(slots.labels[gone]))
        slots.slots, slots.labels = np.delete(slots.slots, gone), np.delete(slots.labels, gone)


def _of_its_class(pool, label):
    """The reservoir of a class after the task."""
    memory = pool.memory
    held = memory.classes.get(label, np.empty(0, np.int64))
    seen = memory.seen_by_class.get(label, 0)
    return reservoir(held, seen, pool.indices[pool.rows(label)], memory.per_class, pool.rng)


def normalise(features: np.ndarray) -> np.ndarray:
    """Scale rows to unit length, adding 1e-8 to the length as in PyCIL: (n, d)."""
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-8)


def herding(features: np.ndarray, quota: int) -> np.ndarray:
    """Greedily pick samples so that the mean of their normalised features is closest to the class mean.

    ``features``: (n, d) of one class. Returns min(quota, n) distinct row numbers in the order of choice; ties are
    broken by position. Source: Rebuffi et al., 2017.
    """
    return nearest_to_mean(normalise(features), quota)


def nearest_to_mean(features: np.ndarray, quota: int) -> np.ndarray:
    """Greedily pick samples so that the mean of their ``features``, (n, d) and at most of length 1, is closest to that
    of all.

    The distance of each candidate is computed, in the features' precision, for the few rows only that a product in
    double precision finds to be nearest but for rounding.
    """
    mean = features.mean(0)
    total = np.zeros_like(mean)
    taken = np.zeros(len(features), bool)
    wide, rounding = features.astype(np.float64), 64 * np.finfo(features.dtype).eps
    squares, exactly = np.square(wide).sum(1), 16 * features.shape[1] * np.finfo(np.float64).eps
    picks = []
    for k in range(1, min(quota, len(features)) + 1):
        ahead = total.astype(np.float64) - k * mean.astype(np.float64)
        apart = squares + 2 * (wide @ ahead)  # |feature + ahead|^2, the squared distance times k^2, less |ahead|^2
        apart[taken] = np.inf
        least = apart.min()
        nearest = np.sqrt(max(least + ahead @ ahead, 0))
        margin = rounding * nearest * (k + nearest) + exactly * (1 + nearest) ** 2
        rows = np.flatnonzero(~(apart > least + margin))  # all, if there are features that are no numbers
        distance = np.sqrt((((features[rows] + total) / k - mean) ** 2).sum(1))
        distance[taken[rows]] = np.inf
        pick = int(rows[distance.argmin()])
        total = total + features[pick]
        taken[pick] = True
        picks.append(pick)
    return np.array(picks, np.int64)


def reservoir(held: np.ndarray, seen: int, stream: np.ndarray, capacity: int, rng: np.random.Generator) -> np.ndarray:
    """Vitter's algorithm R: update ``held``, a uniform sample of ``seen`` items, with the items of ``stream``, in
    random order.
    """
    chosen = held if len(held) <= capacity else rng.permutation(held)[:capacity]
    stream = rng.permutation(stream)
    room = capacity - len(chosen)
    chosen, later = np.concatenate([chosen, stream[:room]]).astype(np.int64), stream[room:]
    slots = rng.integers(np.arange(seen + len(stream) - len(later), seen + len(stream)) + 1)
    for place in np.flatnonzero(slots < capacity):
        chosen[slots[place]] = later[place]
    return chosen
