"""The batches that a learner trains on: what a loss gets, and how an epoch of them is drawn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.batches.epoch_order import (
    WHOLE,
    Share,
    batch_slices,
    epoch_order,
    mixed_order,
    new_in_batches,
    num_batches,
    repeated,
)
from pycil_wsc.data.batches.loader import BatchSource, Source
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.plan import Plan
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.replay_plan import Entering, EpochPlan, Uploaded, draw_sizes, replayed_images, seed_of


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch on the device, or a process's part of one.

    Args:
        images: float32 (B, 3, H, W), augmented and normalised; rows of features in a phase over stored features.
        targets: int64 (B,), classes numbered in learning order.
        indices: int64 (B,), the samples' numbers in the training set.
        from_memory: bool (B,), whether a sample is an exemplar, and not one of the task's own.
        views: further augmentations of the same images, if there are several (``Sampling.views``), or what
            ``before_step`` makes of them.
        plain: the same images as in a test, if they are wanted (``Sampling.plain``).
        whole: the images of the whole batch, if this is a process's part of it; None: as many as these.
        drawn: random tensors, the same in all processes, if any are drawn (``Sampling.draw``), what the source has
            beside images and targets, and what ``before_step`` adds.
        replayed: how many of these images are exemplars, if the host knows it.
        replay: batches that are drawn from a memory that steps fill, one for each of the method's ``draws``; none as
            long as the memory is empty. Their ``whole`` counts all processes.
        slots: int64 (B,), of such a batch: the memory's slots.
        stored: of such a batch: what is stored in these slots, by name.
        entering: the images that enter the memory after the step.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    from_memory: Tensor
    views: tuple[Tensor, ...] = ()
    whole: int | None = None
    drawn: tuple[Tensor, ...] = ()
    replayed: int | None = None
    replay: tuple[Batch, ...] = ()
    slots: Tensor | None = None
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    entering: Entering | None = None
    plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def weight(self) -> int:
        """The number of this process's images, with those that are replayed: its share in a loss over all of them."""
        return len(self) + sum(map(len, self.replay))

    @property
    def exemplars(self) -> int:
        """The number of this process's exemplars, if the host knows it: in this batch, and replayed beside it."""
        return (self.replayed or 0) + sum(map(len, self.replay))

    def joined(self) -> Batch:
        """This batch with the images of ``replay`` behind its own."""
        parts = (self, *self.replay)
        images, targets, indices, from_memory = (
            torch.cat(columns) for columns in zip(*(part.tensors[:4] for part in parts), strict=True)
        )
        return Batch(images, targets, indices, from_memory)

    @property
    def exemplar_rows(self) -> Tensor:
        """The rows of the exemplars, in their order: int64 (k,). Waits for the device only without ``replayed``."""
        number = int(self.from_memory.sum()) if self.replayed is None else self.replayed
        exemplars_first = (~self.from_memory).to(torch.uint8).argsort(stable=True)
        return exemplars_first[:number]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What is on the device: the first four arguments, ``views`` and ``drawn``."""
        return self.images, self.targets, self.indices, self.from_memory, self.views, self.drawn


def rotated(batch: Batch) -> tuple[Tensor, Tensor]:
    """The images rotated by 0, 90, 180 and 270 degrees: (4 B, 3, H, W), and each rotation as 0 to 3: int64 (4 B,).

    The four rotations of an image are consecutive, so ``targets.repeat_interleave(4)`` are their classes.
    """
    turned = torch.stack([torch.rot90(batch.images, turns, (2, 3)) for turns in range(4)], 1)
    turns = torch.arange(4, device=batch.targets.device).repeat(len(batch))
    return turned.flatten(0, 1), turns


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Which samples an epoch has, and how they are loaded.

    Args:
        indices: the samples: int64 (n,).
        mixed: batches follow ``replay_ratio``.
        views: how many augmentations of each image a batch has; all but the first are in ``batch.views``.
        source: None: the training images; otherwise a source of the same interface, such as
            :class:`~pycil_wsc.data.batches.feature_source.FeatureSource`, whose rows ``indices`` are, none of them
            ``from_memory``.
        targets: int64 (rows,), the targets of all rows of ``source``.
        draw: generator on the device -> tensors that the loss needs, such as random numbers: ``batch.drawn``. They are
            the same in all processes.
        batch_size: None: the configured one.
        augmentation: None: the configured one.
        stream: batches draw from a memory that they fill (:class:`~pycil_wsc.data.memory.stream_memory.StreamMemory`).
        times: each batch comes so many times in a row.
        plain: batches also have their images as in a test: ``batch.plain``.
    """

    indices: np.ndarray
    mixed: bool = True
    views: int = 1
    source: BatchSource | None = None
    targets: np.ndarray | None = None
    draw: Callable[[torch.Generator], tuple[Tensor, ...]] | None = None
    batch_size: int | None = None
    augmentation: str | None = None
    stream: bool = False
    times: int = 1
    plain: bool = False


class BatchedLearner(Protocol):
    """What the batches need of a learner."""

    manager: TaskSequence
    processes: Processes
    device: torch.device
    memory: ExemplarMemory
    plan: Plan

    @property
    def config(self) -> LearnerConfig: ...


def class_weights(counts: np.ndarray) -> np.ndarray:
    """N / (C n_c) for the numbers of images n_c of each class, C of them not 0, whose sum is N; else 1: (classes,)."""
    present = counts > 0
    mean = counts.sum() / max(1, present.sum())
    return np.where(present, mean / np.where(present, counts, 1), 1.0)


class Batches:
    """The training batches of a learner: ``self.batches``.

    All random numbers are derived from an address: the task's index, and what tells its epochs apart, such as
    ``(phase, epoch)``. The same address gives the same batches.

    ``source``: the training images, from which the batches are loaded.
    """

    def __init__(self, learner: BatchedLearner, source: Source) -> None:
        self.learner = learner
        self.source = source
        self.held_out: np.ndarray | None = None  # exemplars that the present task does not train on: int64 (n,)

    def indices(self, task: Task) -> np.ndarray:
        """What a task trains on: its samples, as ``plan.new_samples`` says, and all exemplars: (n,).

        Without those that are :attr:`held_out`, if there are any; it is then sorted.
        """
        learner = self.learner
        new_samples = learner.plan.new_samples(task, learner.manager.train_targets)
        indices = np.concatenate([new_samples, learner.memory.indices])
        if self.held_out is None:
            return indices
        return np.sort(indices[~np.isin(indices, self.held_out)])

    def of(self, samples: Sampling, task: int, *address: str | int) -> Iterator[Batch]:
        """Shuffled, augmented batches over ``samples``: this process's part of each.

        A last batch of one image is joined to the previous one: its batch-norm statistics would be those of that image
        alone.
        """
        learner = self.learner
        share = learner.processes.share_of_each_batch
        size = samples.batch_size or learner.config.batch_size
        order, from_memory = self._order(samples, size, task, *address)
        parts = batch_slices(len(order), size, join=True)
        if samples.times > 1:
            from_memory, _ = repeated(from_memory, parts, samples.times)
            order, parts = repeated(order, parts, samples.times)
        numbers = torch.from_numpy(order).to(learner.device)
        old = torch.from_numpy(from_memory).to(learner.device)
        slices = parts if samples.times > 1 else None
        views = [self._pass(samples, order, size, slices, task, *address)]
        views += [
            self._pass(samples, order, size, slices, task, *address, "view", view) for view in range(1, samples.views)
        ]
        plain = self._plain(order, parts) if samples.plain else itertools.repeat(None)
        replay = self._replay(samples, order, parts, task, *address) if samples.stream else itertools.repeat(((), None))
        draws = torch.Generator(learner.device)
        draws.manual_seed(self._seed("draws", task, *address))
        for number, ((images, targets, *beside), *others) in enumerate(zip(*views, strict=True)):
            part = parts[number]
            rows = share.rows(number)
            drawn = samples.draw(draws) if samples.draw else ()
            replayed, entering = next(replay)
            yield Batch(
                images,
                targets,
                numbers[part][rows],
                old[part][rows],
                views=tuple(view for view, _ in others),
                whole=part.stop - part.start,
                drawn=(*drawn, *beside),
                replayed=int(from_memory[part][rows].sum()),
                replay=replayed,
                entering=entering,
                plain=next(plain),
            )

    def plain(
        self, indices: np.ndarray, batch_size: int | None = None, share: Share = WHOLE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training images as in a test, in the order of ``indices`` (n,), and their classes.

        Args:
            indices: the samples.
            batch_size: None: the configured one.
            share: which batches this process gets, such as ``self.processes.share_of_batches``; by default all.

        Yields:
            float32 (B, 3, H, W) and int64 (B,).
        """
        learner = self.learner
        size = learner.config.batch_size if batch_size is None else batch_size
        return self.source.batches(indices, learner.manager.train_targets, size, share=share)

    def from_slots(self, slots: np.ndarray, task: int, *address: str | int, augmented: bool = True) -> Batch:
        """One batch of the exemplars in ``slots`` (n,) of a memory that steps fill, as it is now: this process's part.

        For what :meth:`of` does not plan: draws that depend on the device, or after the task's last step.
        """
        learner = self.learner
        memory = learner.memory
        assert isinstance(memory, StreamMemory)
        own_slots = slots[learner.processes.share_of_each_batch.rows(0)]
        whole = [slice(0, len(slots))]
        (images, targets), *_ = self._of_memory(memory.slots[slots], whole, augmented, task, *address)
        samples = torch.from_numpy(memory.slots[own_slots]).to(learner.device)
        return self._drawn(images, targets, samples, torch.from_numpy(own_slots).to(learner.device), len(slots))

    def _drawn(self, images: Tensor, targets: Tensor, samples: Tensor, slots: Tensor, whole: int) -> Batch:
        """A batch of exemplars in these slots, with what is stored there now."""
        return Batch(
            images,
            targets,
            samples,
            torch.ones_like(samples, dtype=torch.bool),
            whole=whole,
            replayed=len(samples),
            slots=slots,
            stored=self.learner.memory.stored.rows(slots),
        )

    def number(self, samples: int, batch_size: int | None = None) -> int:
        """The number of batches in an epoch over ``samples`` images; by default of the configured size."""
        return num_batches(samples, batch_size or self.learner.config.batch_size, join=True)

    def class_weights(self, samples: Sampling, task: int) -> Tensor | None:
        """The weight of an image of each class, float32 (classes,) on the device; None if all weigh the same."""
        config = self.learner.config
        if config.class_balance != "weights":
            return None
        targets = self._targets(samples)
        shares = np.ones(len(samples.indices))  # how often each image is in an epoch
        newest = self._of_task(task)[samples.indices] if samples.source is None else shares > 0
        if samples.mixed and config.replay_ratio is not None and newest.any() and not newest.all():
            size = samples.batch_size or config.batch_size
            number = sum(new_in_batches(len(shares), config.replay_ratio, size))
            shares = np.where(newest, number / newest.sum(), (len(shares) - number) / (~newest).sum())
        counts = np.bincount(targets[samples.indices], shares, minlength=int(targets.max()) + 1)
        return torch.from_numpy(class_weights(counts)).float().to(self.learner.device)

    def exemplars_in_epoch(self, samples: Sampling, task: int) -> int:
        """How many images of the batches of an epoch are exemplars, in all processes; if balanced, of the first one."""
        if samples.source is not None:
            return 0
        if samples.stream:
            return sum(self.replayed(samples, task, 0, 0))
        config = self.learner.config
        if config.class_balance == "sampler":
            _, from_memory = self._order(samples, samples.batch_size or config.batch_size, task, 0, 0)
            return int(from_memory.sum())
        total = len(samples.indices)
        newest = int(self._of_task(task)[samples.indices].sum())
        if samples.mixed and config.replay_ratio is not None and 0 < newest < total:
            newest = sum(new_in_batches(total, config.replay_ratio, samples.batch_size or config.batch_size))
        return total - newest

    def first_replayed(self, samples: Sampling, task: int, *address: str | int) -> int:
        """The number of the first whole batch that has exemplars; 0 if none has any."""
        if samples.stream:
            return next((number for number, images in enumerate(self.replayed(samples, task, *address)) if images), 0)
        size = samples.batch_size or self.learner.config.batch_size
        order, from_memory = self._order(samples, size, task, *address)
        parts = batch_slices(len(order), size, join=True)
        return next((number for number, part in enumerate(parts) if from_memory[part].any()), 0)

    def replayed(self, samples: Sampling, task: int, *address: str | int) -> list[int]:
        """How many exemplars each step of an epoch draws from a memory that steps fill, in all processes."""
        learner = self.learner
        memory = learner.memory
        config = learner.config
        assert isinstance(memory, StreamMemory)
        size = samples.batch_size or config.batch_size
        order, _ = self._order(samples, size, task, *address)
        slices = batch_slices(len(order), size, join=True)
        sizes = draw_sizes(learner.plan.draws(learner.manager.tasks[task]), config)
        labels = learner.manager.train_targets[order]
        counts = replayed_images(memory, labels, slices, sizes, learner.plan.fills_by_step)
        return [count for count in counts for _ in range(samples.times)]

    def _of_task(self, task: int) -> np.ndarray:
        """Whether each training sample is one of the task's own: bool (N,)."""
        manager = self.learner.manager
        of_task = np.zeros(len(manager.train_targets), bool)
        of_task[manager.tasks[task].train_indices] = True
        return of_task

    def _seed(self, what: str, task: int, *address: str | int) -> int:
        """The seed of random numbers of an epoch."""
        return seed_of(self.learner.config, what, task, *address)

    def _order(self, samples: Sampling, size: int, task: int, *address: str | int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of an epoch in their order, (n,), and whether each is an exemplar: bool (n,)."""
        config = self.learner.config
        indices = samples.indices
        seed = self._seed("batches", task, *address)
        labels = self._targets(samples) if config.class_balance == "sampler" else None  # of all rows
        if samples.source is not None:  # rows of another source, of which the memory knows nothing
            order = epoch_order(indices, True, seed, labels)
            return order, np.zeros(len(order), bool)
        of_task = self._of_task(task)
        newest = of_task[indices]
        if samples.mixed and config.replay_ratio is not None and newest.any() and not newest.all():
            order = mixed_order(indices[newest], indices[~newest], config.replay_ratio, size, seed, labels)
        else:
            order = epoch_order(indices, True, seed, labels)
        return order, ~of_task[order]

    def _targets(self, samples: Sampling) -> np.ndarray:
        """The classes of all rows of the source: int64 (rows,)."""
        return self.learner.manager.train_targets if samples.targets is None else samples.targets

    def _replay(
        self, samples: Sampling, order: np.ndarray, parts: list[slice], task: int, *address: str | int
    ) -> Iterator[tuple[tuple[Batch, ...], Entering | None]]:
        """For each step what is drawn from the memory, and what enters it; the memory is left as it is."""
        learner = self.learner
        memory = learner.memory
        assert isinstance(memory, StreamMemory)
        config = learner.config
        draws = learner.plan.draws(learner.manager.tasks[task])
        labels = learner.manager.train_targets[order]
        fills = learner.plan.fills_by_step
        seeds = [self._seed("stream", task, *address)]
        seeds += [self._seed("slots", task, *address, "draw", number) for number in range(len(draws))]
        rngs = [np.random.default_rng(seed) for seed in seeds]
        plan = EpochPlan(memory.copy(), order, labels, parts, samples.times, draw_sizes(draws, config), rngs, fills)
        enters = [fills and number % samples.times == samples.times - 1 for number in range(len(parts))]
        uploaded = Uploaded(plan, order, labels, parts, enters, learner.processes, learner.device)
        passes = []
        for number, draw in enumerate(draws):
            exemplars = np.concatenate([np.empty(0, np.int64), *plan.samples[number]])
            ends = np.cumsum([len(step) for step in plan.samples[number]]).tolist()
            filled = [slice(start, end) for start, end in zip([0, *ends], ends) if end > start]
            where = task, *address, "draw", number
            passes.append(_begun(self._of_memory(exemplars, filled, draw.augmented, *where)))
        for step in range(len(parts)):
            replayed = []
            for number, images_and_targets in enumerate(passes):
                chosen = plan.samples[number][step]
                if len(chosen):
                    images, targets = next(images_and_targets)
                    slots = uploaded.drawn[number][step]
                    of_slots = uploaded.samples[number][step]
                    replayed.append(self._drawn(images, targets, of_slots, slots, len(chosen)))
            yield tuple(replayed), uploaded.entering(step)

    def _of_memory(
        self, exemplars: np.ndarray, slices: list[slice], augmented: bool, task: int, *address: str | int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets of exemplars, in these batches."""
        learner = self.learner
        return self.source.batches(
            exemplars,
            learner.manager.train_targets,
            len(exemplars),
            train=augmented,
            seed=self._seed("replay", task, *address),
            shuffle=False,
            share=learner.processes.share_of_each_batch,
            augmentation=learner.config.augmentation,
            slices=slices,
        )

    def _plain(self, order: np.ndarray, parts: list[slice]) -> Iterator[Tensor]:
        """The images of an epoch as in a test, batch by batch."""
        learner = self.learner
        share = learner.processes.share_of_each_batch
        targets = learner.manager.train_targets
        for images, _ in self.source.batches(order, targets, len(order), share=share, slices=parts):
            yield images

    def _pass(
        self,
        samples: Sampling,
        order: np.ndarray,
        size: int,
        slices: list[slice] | None,
        task: int,
        *address: str | int,
    ) -> Iterator[tuple]:
        """One augmentation of the images of an epoch, batch by batch."""
        learner = self.learner
        if samples.source is None:
            augmentation = samples.augmentation or learner.config.augmentation
            batches = functools.partial(self.source.batches, augmentation=augmentation)
        else:
            batches = samples.source.batches
        if slices is not None:
            batches = functools.partial(batches, slices=slices)
        return batches(
            order,
            self._targets(samples),
            size,
            train=True,
            seed=self._seed("batches", task, *address),
            shuffle=False,
            share=learner.processes.share_of_each_batch,
        )


def _begun(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches, of which the first is there already: with it, a source copies its order to the device."""
    return itertools.chain([*itertools.islice(batches, 1)], batches)
