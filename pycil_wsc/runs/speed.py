"""How fast learners train on this machine: a few steps of each phase, timed in the real loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from pycil_wsc import registry
from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.tasks.tasks import Task, tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import make_current, numbered, resolved_device, synchronize
from pycil_wsc.errors import UserError, described
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.reproducibility import deterministic, threads
from pycil_wsc.runs.planning import plan_of
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.phase import Monitor, Phase, PhaseRun

WARM_UP, TIMED = 5, 5  # steps of a phase: warm-up (fills caches, records a CUDA graph), then timed


def measured(config: LearnerConfig, dataset: Dataset) -> Stopwatch:
    """:func:`measure` and print the speed. Raises a :class:`UserError` if that is not possible."""
    try:
        with threads(config.threads):
            watch = measure(config, dataset)
    except UserError:
        raise
    except Exception as error:  # such as a GPU without enough memory
        raise UserError(f"--measure: {config.method} cannot be trained here ({described(error)})") from error
    print(f"measured {config.method}: {watch}", flush=True)
    return watch


def measure(config: LearnerConfig, dataset: Dataset) -> Stopwatch:
    """Train a few steps of each phase of the first, the second and the last task.

    Data, networks and batches are those of the run, but exemplars are chosen at random, which is faster than herding.
    Nothing is written.
    """
    if registry.exemplars[config.exemplars].by_class:
        config = dataclasses.replace(config, exemplars="random")
    device = numbered(resolved_device(config.device))
    make_current(device)
    keep_freed_memory(device)
    manager = tasks_of(dataset, config)
    source = open_source(dataset.info, dataset.train, device, config.num_workers)
    with contextlib.closing(source), deterministic(config.deterministic):
        learner = truncated(configured_learner(config))(config, manager, source, device)
        decoded_ahead = 0 if dataset.train.in_memory else 2 * config.num_workers  # batches ready before the first step
        watch = Stopwatch(learner, WARM_UP + decoded_ahead)
        for task in manager.tasks:
            chosen = task.index in (0, 1, len(manager.tasks) - 1)
            learner.most_steps = watch.warm_up + TIMED if chosen else 0
            learner.learn(task, watch)
    return watch


@functools.cache
def truncated(learner: type[BaseLearner]) -> type[Truncated]:
    """A subclass of ``learner`` whose phases end after ``most_steps`` steps."""
    return type(f"Truncated{learner.__name__}", (Truncated, learner), {})


class Truncated(BaseLearner):
    """A mixin for learners that ends each phase after ``most_steps`` steps.

    ``planned``: task -> the number of images that each of its phases would train on, within the budget if there is one.
    """

    most_steps = 0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.planned: dict[int, list[float]] = {}
        self.plan_of_tasks = plan_of(self.config, self.manager) if self.config.by_step else []

    def begin_task(self, task: Task) -> None:
        self.planned[task.index] = []  # also of a task that trains nothing
        super().begin_task(task)

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        super().begin_phase(task, run)
        self.planned[task.index].append(run.steps / run.batches * self._images_of_epoch(task, run.phase))
        run.end_after(min(self.most_steps, run.steps))

    def phases(self, task: Task) -> Iterator[Phase]:
        for number, phase in enumerate(super().phases(task)):
            before = self.spent.operations
            yield phase
            images = self._images_of_epoch(task, phase)
            epochs = self.planned[task.index][number] / images
            of_epoch = images * len(phase.indices) / phase.counted_images * (self.spent.per_image or 0)
            exemplars = self.batches.exemplars_in_epoch(phase, task.index)
            if phase.stream:
                exemplars = images - phase.times * phase.counted_images
            of_epoch += exemplars * (self.spent.per_exemplar or 0)
            self.spent.operations = round(before + epochs * of_epoch)  # as if it were all done

    def _images_of_epoch(self, task: Task, phase: Phase) -> float:
        """The images that an epoch counts as.

        If steps fill the memory, also those that are replayed: as planned, since the few steps leave it nearly empty.
        """
        if phase.stream:
            return self.plan_of_tasks[task.index] / phase.epochs
        return phase.times * phase.counted_images

    def end_task(self, task: Task) -> None:
        """Only detach what is attached to the network: the task is not trained to its end."""
        consolidation = getattr(self, "consolidation", None)
        if consolidation:
            consolidation.detach()
            self.consolidation = None


class Stopwatch(Monitor):
    """Times the steps of each phase of a :class:`Truncated` learner after ``warm_up`` steps."""

    def __init__(self, learner: Truncated, warm_up: int) -> None:
        self.learner = learner
        self.warm_up = warm_up
        self.speeds: dict[tuple[int, int], float] = {}  # (task, number of its phase) -> seconds per image
        self.names: dict[tuple[int, int], str] = {}  # (task, number of its phase) -> the phase's name
        self.untimed = 0  # steps of the phase that are still to be left out
        self.images = 0.0  # images in the timed steps
        self.started = 0.0

    def phase_started(self, task: Task, run: PhaseRun) -> None:
        self.untimed = max(0, min(self.warm_up, run.steps - 1))
        self.images = 0.0
        self.started = self._now()

    def step(self, images: int) -> None:
        if not self.untimed:
            self.images += images
            return
        self.untimed -= 1
        if not self.untimed:
            self.started = self._now()

    def epoch_ended(self, task: Task, run: PhaseRun, epoch: int, loss: float, accuracy: float) -> None:
        if self.images:
            phase = run.phase
            images = self.images * phase.counted_images / len(phase.indices)
            self.speeds[task.index, run.number] = (self._now() - self.started) / images
            self.names[task.index, run.number] = phase.name

    def seconds(self, task: int) -> float:
        """The seconds of all phases of a task; interpolated linearly between measured tasks."""
        return sum(images * self._speed(task, number) for number, images in enumerate(self.learner.planned[task]))

    def seconds_per_image(self) -> list[float]:
        """The seconds of each task over its images."""
        return [self.seconds(task) / max(1, sum(images)) for task, images in self.learner.planned.items()]

    def _speed(self, task: int, number: int) -> float:
        measured = {t: speed for (t, phase), speed in self.speeds.items() if phase == number and bool(t) == bool(task)}
        if not measured:  # no measured task has this phase
            return self._speed(task, 0)
        return float(np.interp(task, list(measured), list(measured.values())))

    def _now(self) -> float:
        """The time after all work queued on the device is done."""
        synchronize(self.learner.device)
        return time.perf_counter()

    def __str__(self) -> str:
        """The images per second of each measured task, phase by phase."""
        parts: dict[int, list[str]] = defaultdict(list)
        for (task, number), speed in self.speeds.items():
            parts[task].append(f"{self.names[task, number]} {1 / speed:,.0f}")
        tasks = (f"task {task + 1} {', '.join(phases)}" for task, phases in parts.items())
        return f"{'; '.join(tasks)} images/s"
