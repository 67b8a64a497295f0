"""The replay of an epoch whose steps fill the memory: what each step draws from it, and what enters it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycil_wsc import seeding
from pycil_wsc.data.batches.epoch_order import batch_slices
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import NONE, StreamMemory
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.processes import Processes


@dataclass(frozen=True)
class Draw:
    """A batch that each step draws from the memory, without repetition, with its own augmentation.

    Args:
        size: the number of exemplars; None: ``replay_batch_size``.
        augmented: False: as in a test.
    """

    size: int | None = None
    augmented: bool = True


@dataclass(frozen=True, eq=False)
class Entering:
    """The images of a batch that enter the memory.

    Args:
        samples: int64 (B,), on the host: the whole batch.
        labels: int64 (B,), their classes.
        places: int64 (B,), the slot that each enters, or ``NONE``.
        slots: int64 (m,), on the device: these slots, each once.
        rows: int64 (k,), on the device: the rows of this process's part of the batch that are in the slots afterwards.
        at: int64 (k,), their places among ``slots``.
    """

    samples: np.ndarray
    labels: np.ndarray
    places: np.ndarray
    slots: Tensor
    rows: Tensor
    at: Tensor

    def into(self, memory: ExemplarMemory, values: Mapping[str, Tensor], processes: Processes) -> None:
        """Let the images enter, and store a row of ``values`` with each: (B, ...), of this process's part by name."""
        assert isinstance(memory, StreamMemory)
        memory.enter(self.samples, self.labels, self.places)
        if not len(self.slots):
            return
        for name, value in values.items():
            rows = value.detach()[self.rows]
            if processes.count > 1:
                rows = processes.sum_(rows.new_zeros(len(self.slots), *rows.shape[1:]).index_copy_(0, self.at, rows))
            memory.stored.put(name, self.slots, rows)


def seed_of(config: LearnerConfig, what: str, task: int, *address: str | int) -> int:
    """The seed of random numbers of an epoch; ``batch_seed`` replaces the run's after the first task."""
    seed = config.seed if config.batch_seed is None or task == 0 else config.batch_seed
    return seeding.derived_seed(seed, what, task, *address)


def draw_sizes(draws: Iterable[Draw], config: LearnerConfig) -> list[int]:
    """The sizes of the batches that each step draws from the memory, once it holds as many."""
    return [draw.size or config.replay_batch_size or config.batch_size for draw in draws]


class EpochPlan:
    """What the steps of an epoch draw and what enters, in advance: the memory itself is left as it is.

    Args:
        memory: the memory before the epoch.
        order: int64 (n,), the samples of the epoch.
        labels: int64 (n,), their classes.
        slices: the batches. Of ``times`` equal ones in a row, the last enters the memory.
        sizes: of the batches that each step draws.
        rngs: a source of random numbers for what enters, then one for each of these.
        fills: whether steps fill the memory.
    """

    def __init__(
        self,
        memory: StreamMemory,
        order: np.ndarray,
        labels: np.ndarray,
        slices: Sequence[slice],
        times: int,
        sizes: Sequence[int],
        rngs: Sequence[np.random.Generator],
        fills: bool,
    ) -> None:
        self.places: list[np.ndarray] = []  # of each step: (B,)
        self.drawn: list[list[np.ndarray]] = [[] for _ in sizes]  # of each draw and step: slots (k,)
        self.samples: list[list[np.ndarray]] = [[] for _ in sizes]  # the samples in them
        enter, *others = rngs
        last = [number % times == times - 1 for number in range(len(slices))]
        rows = [np.arange(batch.start, batch.stop) for batch, enters in zip(slices, last) if enters and fills]
        entering = np.concatenate([np.empty(0, np.int64), *rows])
        chosen = np.full(len(order), NONE)
        chosen[entering] = memory.choose(labels[entering], enter)
        held = np.concatenate([memory.slots, np.zeros(max(0, int(chosen.max(initial=NONE)) + 1 - len(memory)), int)])
        filled = len(memory)
        for batch in slices:
            for which, (size, rng) in enumerate(zip(sizes, others, strict=True)):
                slots = rng.choice(filled, min(size, filled), replace=False) if filled else held[:0]
                self.drawn[which].append(slots)
                self.samples[which].append(held[slots])
            places = chosen[batch]
            enters = places != NONE
            held[places[enters]] = order[batch][enters]
            filled = max(filled, int(places.max(initial=NONE)) + 1)
            self.places.append(places)


def replayed_images(
    memory: StreamMemory, labels: np.ndarray, slices: Sequence[slice], sizes: Sequence[int], fills: bool
) -> list[int]:
    """How many exemplars a step on each batch of an epoch replays, in batches of these ``sizes``.

    ``labels``: int64 (n,), the classes of the epoch's samples in their order.
    """
    filled = memory.filled(labels) if fills else np.full(len(labels), len(memory))
    return [sum(min(size, int(filled[batch.start])) for size in sizes) for batch in slices]


def planned_images(
    memory: StreamMemory, orders: Iterable[np.ndarray], batch_size: int, times: int, sizes: Sequence[int], fills: bool
) -> int:
    """The images of a task's steps, over all epochs, with those that they replay.

    Args:
        memory: the memory before the task, which is left as it is.
        orders: the classes of each epoch's samples in their order, (n,); later ones are read only if it may matter.
        batch_size: images in a batch.
        times: steps on each batch.
        sizes: of the batches that each step draws.
        fills: whether steps fill the memory.
    """
    memory = memory.counting()
    rng = np.random.default_rng(0)  # which slots are filled does not depend on it
    total = 0
    of_epoch = 0
    constant = False
    for labels in orders:
        if not constant:
            slices = batch_slices(len(labels), batch_size, join=True)
            of_epoch = len(labels) + sum(replayed_images(memory, labels, slices, sizes, fills))
            constant = not (fills and memory.has_room(labels))
            if fills:
                memory.enter(labels, labels, memory.choose(labels, rng))
        total += times * of_epoch
    return total


class Uploaded:
    """The numbers of an :class:`EpochPlan` on the device, copied there once."""

    def __init__(
        self,
        plan: EpochPlan,
        order: np.ndarray,
        labels: np.ndarray,
        slices: Sequence[slice],
        enters: Sequence[bool],
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.order = order
        self.labels = labels
        self.slices = slices
        self.enters = enters  # whether the batch of each step enters the memory
        share = processes.share_of_each_batch
        entered = [_entered(places, processes) for places in plan.places]
        self.slots = _uploaded([slots for slots, _, _ in entered], device)
        self.rows = _uploaded([rows for _, rows, _ in entered], device)
        self.at = _uploaded([at for _, _, at in entered], device)
        self.drawn = [_uploaded([slots[share.rows(0)] for slots in steps], device) for steps in plan.drawn]
        self.samples = [_uploaded([chosen[share.rows(0)] for chosen in steps], device) for steps in plan.samples]

    def entering(self, step: int) -> Entering | None:
        """What enters the memory after a step; None after those before the last one on a batch."""
        if not self.enters[step]:
            return None
        batch = self.slices[step]
        places = self.plan.places[step]
        return Entering(self.order[batch], self.labels[batch], places, self.slots[step], self.rows[step], self.at[step])


def entering_of(
    samples: np.ndarray, labels: np.ndarray, places: np.ndarray, processes: Processes, device: torch.device
) -> Entering:
    """What enters the memory outside the steps of an epoch: ``samples`` of the classes ``labels``, into ``places``."""
    slots, rows, at = (_uploaded([part], device)[0] for part in _entered(places, processes))
    return Entering(samples, labels, places, slots, rows, at)


def _entered(places: np.ndarray, processes: Processes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slots that are entered, each once, and the rows of :class:`Entering` with their places among these."""
    slots, row = _last_of_each_slot(places)
    here = np.arange(len(places))[processes.share_of_each_batch.rows(0)]  # the rows of this process, of any batch
    is_here = np.isin(row, here)
    return slots, np.searchsorted(here, row[is_here]), np.flatnonzero(is_here)


def _last_of_each_slot(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots that are entered, each once, and the row of the image that is in each of them afterwards."""
    backwards = places[::-1]
    slots, first = np.unique(backwards, return_index=True)
    rows = len(places) - 1 - first
    entered = slots != NONE
    return slots[entered], rows[entered]


def _uploaded(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in one copy."""
    whole = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts])).to(device)
    return list(whole.split([len(part) for part in parts]))
