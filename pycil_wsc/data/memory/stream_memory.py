"""A memory that training steps fill: slots, each with a sample of the training set, and what is stored beside it.

Which slot a sample enters, and which slots are replayed, depends on counters, classes and seeds alone. All of it is
known on the host before an epoch begins, so that no step waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.state import State

NONE = -1  # in the place of a slot: the sample is not kept


class StreamMemory(ExemplarMemory):
    """A reservoir of ``total`` slots, or with ``fixed`` one of ``per_class`` slots for each class.

    Each presentation of an image is a new item of the stream, as in Mammoth, so that several slots may hold the same
    sample. ``classes`` and ``indices`` have each sample once; ``len`` is the number of filled slots.

    Args:
        strategy: ``reservoir`` (Vitter, 1985), ``balanced`` (Chrysakis and Moens, ICML 2020), or ``ring``: an equal
            share of the slots for each task, of which the oldest sample leaves first.
        presented: task -> the samples that it presents, (n,), for a copy that only counts (:meth:`counting`).
    """

    def __init__(
        self,
        fixed: bool,
        per_class: int,
        total: int,
        strategy: str,
        capacity: Callable[[int], int] | None = None,
        device: torch.device = torch.device("cpu"),
        presented: Callable[[Task], np.ndarray] = lambda task: task.train_indices,
    ) -> None:
        super().__init__(fixed, per_class, total, strategy, capacity, device)
        self.stored = SlotValues(self, device)
        self.presented = presented
        self.counts_only = False
        self.size = total  # slots in all, without `fixed`; see `limit`
        self.slots = np.empty(0, np.int64)  # the sample in each filled slot
        self.labels = np.empty(0, np.int64)  # its class
        self.full: set[int] = set()  # `balanced`: the classes that were the largest one once
        self.share = total  # `ring`: slots of each task; see `limit`
        self.filled_before = 0  # `ring`: slots that earlier tasks have filled
        self.seen_before = 0  # `ring`: samples of earlier tasks

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def classes(self) -> dict[int, np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Class -> its samples, each once: those of the first slots first."""
        kept = {}
        for label in np.unique(self.labels).tolist():
            samples = self.slots[self.labels == label]
            _, first = np.unique(samples, return_index=True)
            kept[label] = samples[np.sort(first)]
        return kept

    def limit(self, num_classes: int, num_tasks: int = 1) -> None:
        """Keep as many slots as fit with logits of so many classes: all, unless ``memory_bytes`` pays for them.

        ``num_tasks``: the tasks of the run, which share a ring.
        """
        if self.fixed:
            return
        self.size = self.capacity(num_classes)
        self.share = self.size // num_tasks
        kept = self.size
        if self.strategy == "ring" and self.tasks < num_tasks:
            kept = self.size - self.share  # more only if the list of tasks has become longer
            self.filled_before = min(self.filled_before, kept)
        self.slots = self.slots[:kept]  # a reservoir's first slots are as random as any
        self.labels = self.labels[:kept]

    def select(self, rows: np.ndarray) -> None:
        """Keep these slots alone, in this order, as if nothing else had come: int64 (n,)."""
        self.slots = self.slots[rows]
        self.labels = self.labels[rows]
        self.seen = len(rows)
        self.stored.select(rows)

    def copy(self) -> StreamMemory:
        """A copy to plan with."""
        other = copy.copy(self)
        other.slots = self.slots.copy()
        other.labels = self.labels.copy()
        other.seen_by_class = dict(self.seen_by_class)
        other.full = set(self.full)
        return other

    # ---- what enters -------------------------------------------------------------------------------------------------

    def choose(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The slot that each of the next samples of the stream enters, or ``NONE``: int64 (n,).

        ``labels``: int64 (n,), their classes. A sample may enter the slot of an earlier one.
        """
        if self.fixed:
            return self._of_its_class(labels, rng)
        if self.strategy == "balanced" and not self.counts_only:  # which slots are filled does not depend on it
            return self._balanced(labels, rng)
        if self.strategy == "ring":
            return self.filled_before + (self.seen - self.seen_before + np.arange(len(labels))) % max(1, self.share)
        return self._reservoir(len(labels), rng)

    def enter(self, samples: np.ndarray, labels: np.ndarray, places: np.ndarray) -> None:
        """Put ``samples`` (n,) of the classes ``labels`` into the slots ``places``, and count the stream."""
        missing = int(places.max(initial=NONE)) + 1 - len(self.slots)
        if missing > 0:
            self.slots = np.concatenate([self.slots, np.zeros(missing, np.int64)])
            self.labels = np.concatenate([self.labels, np.zeros(missing, np.int64)])
        kept = places != NONE
        self.slots[places[kept]] = samples[kept]
        self.labels[places[kept]] = labels[kept]
        self.seen += len(labels)
        for label, number in zip(*np.unique(labels, return_counts=True)):
            self.seen_by_class[int(label)] = self.seen_by_class.get(int(label), 0) + int(number)

    def filled(self, labels: np.ndarray) -> np.ndarray:
        """The number of filled slots before each of the next samples of the stream, whatever is drawn: int64 (n,)."""
        number = len(labels)
        if self.strategy == "ring":
            return np.minimum(len(self) + np.arange(number), self.filled_before + self.share)
        if not self.fixed:
            return np.minimum(len(self) + np.arange(number), max(self.size, len(self)))
        new = self._enters_free_slot(labels)
        return len(self) + np.cumsum(new) - new

    def has_room(self, labels: np.ndarray) -> bool:
        """Whether samples of these classes may enter a free slot."""
        if self.strategy == "ring":
            return len(self) < self.filled_before + self.share
        return bool(self._enters_free_slot(labels).any()) if self.fixed else len(self) < self.size

    def _enters_free_slot(self, labels):
        """With ``fixed``, whether each of the samples enters a slot that its class has left: bool (n,)."""
        enters = np.zeros(len(labels), bool)
        for label in np.unique(labels).tolist():
            rows = np.flatnonzero(labels == label)
            room = max(0, self.per_class - int((self.labels == label).sum()))
            enters[rows[:room]] = True
        return enters

    def _reservoir(self, number, rng):
        """Vitter's algorithm R."""
        filled = len(self)
        room = min(number, max(0, self.size - filled))
        seen = self.seen + np.arange(room, number)
        drawn = rng.integers(seen + 1)
        return np.concatenate([np.arange(filled, filled + room), np.where(drawn < self.size, drawn, NONE)])

    def _of_its_class(self, labels, rng):
        """A reservoir for each class."""
        places = np.full(len(labels), NONE)
        free = self._enters_free_slot(labels)
        places[free] = len(self) + np.arange(free.sum())
        for label in np.unique(labels).tolist():
            rows = np.flatnonzero(labels == label)
            slots = np.concatenate([np.flatnonzero(self.labels == label), places[rows[free[rows]]]])
            later = ~free[rows]
            seen = self.seen_by_class.get(label, 0) + np.arange(len(rows))[later]
            drawn = rng.integers(seen + 1)
            enters = drawn < len(slots)
            places[rows[later][enters]] = slots[drawn[enters]]
        return places

    def _balanced(self, labels, rng):
        """Class-balancing reservoir sampling: a class that was never the largest takes a slot of one that is."""
        slots_of: dict[int, list[int]] = {}
        for slot, label in enumerate(self.labels.tolist()):
            slots_of.setdefault(label, []).append(slot)
        seen = dict(self.seen_by_class)
        filled = len(self)
        places = np.full(len(labels), NONE)
        for row, label in enumerate(labels.tolist()):
            seen[label] = seen.get(label, 0) + 1
            of_label = slots_of.setdefault(label, [])
            if filled < self.size:
                of_label.append(filled)
                places[row] = filled
                filled += 1
                continue
            most = max(map(len, slots_of.values()))
            largest = [candidate for candidate, slots in slots_of.items() if len(slots) == most]
            self.full.update(largest)
            if label in self.full:
                drawn = int(rng.integers(seen[label]))
                places[row] = of_label[drawn] if drawn < len(of_label) else NONE
                continue
            instances = [(candidate, place) for candidate in largest for place in range(most)]
            giver, place = instances[int(rng.integers(len(instances)))]
            slot = slots_of[giver].pop(place)
            of_label.append(slot)
            places[row] = slot
        return places

    # ---- at the end of a task ----------------------------------------------------------------------------------------

    def update(
        self,
        task: Task,
        targets: np.ndarray,
        features: Callable[[np.ndarray], np.ndarray] | None,
        rng: np.random.Generator,
        map_classes: Callable[..., Iterable[np.ndarray]] = map,
        quotas: Sequence[int] | None = None,
    ) -> None:
        """Nothing is left to choose: the steps have done it. Only a copy that counts is filled as they will do it."""
        if self.counts_only:
            presented = self.presented(task)
            self.enter(presented, targets[presented], self.choose(targets[presented], rng))
        self.tasks = task.index + 1
        self.filled_before = len(self)
        self.seen_before = self.seen

    def counting(self) -> StreamMemory:
        other = self.copy()
        other.counts_only = True
        return other

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        slots = {"slots": self.slots.tolist(), "labels": self.labels.tolist(), "full": sorted(self.full)}
        before = {"filled_before": self.filled_before, "seen_before": self.seen_before}
        return super().state_dict() | slots | before

    def load_state_dict(self, state: State) -> None:
        self.slots = np.array(state["slots"], np.int64)
        self.labels = np.array(state["labels"], np.int64)
        self.full = set(state["full"])
        self.filled_before = state["filled_before"]
        self.seen_before = state["seen_before"]
        self.seen = state["seen"]
        self.seen_by_class = dict(state["seen_by_class"])
        self.tasks = state["tasks"]

    @staticmethod
    def renumbered(state: State, numbers: np.ndarray) -> State:
        slots = numbers[np.array(state["slots"], np.int64)]
        labels = np.array(state["labels"], np.int64)[slots >= 0]
        slots = slots[slots >= 0]
        return ExemplarMemory.renumbered(state, numbers) | {"slots": slots.tolist(), "labels": labels.tolist()}


class SlotValues:
    """What is stored with each slot of a :class:`StreamMemory`, under a name: logits, features, tasks, scores.

    Lives on the device, where steps read and write it. ``memory``: says how many slots are filled.
    """

    def __init__(self, memory: StreamMemory, device: torch.device) -> None:
        self.memory = memory
        self.device = device
        self.tables: dict[str, Tensor] = {}  # name -> (at least as many rows as slots, ...)

    def put(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Store ``values`` (m, ...) in the distinct ``slots``: int64 (m,) on the device. Does not synchronise.

        Rows that are narrower, as logits are before a head grows, are filled up with nan.
        """
        values = values.detach()
        values = values.float() if values.is_floating_point() else values
        table = self.tables.get(name)
        if table is None:
            table = values.new_zeros(0, *values.shape[1:])
        if table.dim() > 1 and table.shape[1] < values.shape[1]:
            table = torch.nn.functional.pad(table, (0, values.shape[1] - table.shape[1]), value=torch.nan)
        missing = len(self.memory) - len(table)
        if missing > 0:
            empty = table.new_zeros(max(missing, len(table)), *table.shape[1:])
            table = torch.cat([table, empty])
        self.tables[name] = table.index_copy_(0, slots, values)

    def of(self, name: str, slots: Tensor) -> Tensor:
        """What is stored in ``slots``: int64 (m,) on the device -> (m, ...). Does not synchronise."""
        return self.tables[name][slots]

    def rows(self, slots: Tensor) -> dict[str, Tensor]:
        """All that is stored in ``slots``, by name."""
        return {name: table[slots] for name, table in self.tables.items()}

    def select(self, rows: np.ndarray) -> None:
        """Keep the rows of these slots alone, in this order: int64 (n,). :meth:`StreamMemory.select` does it."""
        chosen = torch.from_numpy(rows).to(self.device)
        self.tables = {name: table[chosen] for name, table in self.tables.items()}

    def state_dict(self) -> State:
        samples = torch.from_numpy(self.memory.slots.copy())
        number = len(samples)
        return {name: {"indices": samples, "values": rows[:number].cpu().clone()} for name, rows in self.tables.items()}

    def load_state_dict(self, state: State) -> None:
        self.tables = {name: table["values"].to(self.device) for name, table in state.items()}
