"""Estimates training time on this machine from a few steps of each method and phase, timed in the real loop."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from pycil_wsc import registry
from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.options import Config
from pycil_wsc.data.loader import open_source
from pycil_wsc.data.tasks import Task, tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import numbered, resolved_device, synchronize
from pycil_wsc.engine.environment import deterministic
from pycil_wsc.engine.phase import Phase
from pycil_wsc.errors import UserError
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.runs.planning import plan_of

WARM_UP, TIMED = 5, 5  # steps of a phase: warm-up (fills caches, records a CUDA graph), then timed


def measurer(for_training: Callable[[Dataset, Config], Dataset]) -> Callable[[Config, Dataset], float]:
    """A function that estimates the training time of a whole run, in seconds, from its configuration and data.

    ``for_training`` returns the data that the run reads, such as the copies that ``cache_images`` asks for. Runs whose
    steps take equally long share a measurement. Testing, the choice of exemplars, resets and saving are not included.
    """
    measured: dict[str, list[float]] = {}

    def seconds(config: Config, dataset: Dataset) -> float:
        relevant = {name: value for name, value in config.to_dict().items() if _is_relevant(name, config)}
        key = json.dumps(relevant, sort_keys=True)
        if key not in measured:
            measured[key] = _measured(config, for_training(dataset, config))
        plan = plan_of(config, tasks_of(dataset, config))
        return sum(images * each for images, each in zip(plan, measured[key], strict=True))

    return seconds


def _is_relevant(name: str, config: Config) -> bool:
    key = config.keys[name]
    return key.affects == "time" and key.decides not in ("name", "files")


def _measured(config: Config, dataset: Dataset) -> list[float]:
    """Measure and print the speed; returns seconds per training image for each task."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or threads)
        watch = measure(config, dataset)
    except UserError:
        raise
    except Exception as error:  # such as a GPU without enough memory
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--measure: {config.method} cannot be trained here ({message})") from error
    finally:
        torch.set_num_threads(threads)
    print(f"measured {config.method}: {watch}", flush=True)
    return watch.seconds_per_image()


def measure(config: Config, dataset: Dataset) -> Stopwatch:
    """Train a few steps of each phase of the first, the second and the last task.

    Data, networks and batches are those of the run, but exemplars are chosen at random, which is faster than herding.
    Nothing is written.
    """
    if registry.exemplars[config.exemplars].by_class:
        config = dataclasses.replace(config, exemplars="random")
    deterministic(config.deterministic)
    device = numbered(resolved_device(config.device))
    keep_freed_memory(device)
    manager = tasks_of(dataset, config)
    source = open_source(dataset.info, dataset.train, device, config.num_workers)
    learner = truncated(config.learner)(config, manager, source, device)
    decoded_ahead = 0 if dataset.train.in_memory else 2 * config.num_workers  # batches ready before the first step
    watch = Stopwatch(learner, WARM_UP + decoded_ahead)
    for task in manager.tasks:
        chosen = task.index in (0, 1, len(manager.tasks) - 1)
        learner.most_steps = watch.warm_up + TIMED if chosen else 0
        learner.learn(task, watch)
    return watch


@functools.cache
def truncated(learner: type[BaseLearner]) -> Any:
    """A subclass of ``learner`` whose phases end after ``most_steps`` steps."""
    return type(f"Truncated{learner.__name__}", (Truncated, learner), {})


class Truncated(BaseLearner):
    """A mixin for learners that shortens each phase to ``most_steps`` steps.

    If an epoch has fewer batches, a phase has as many whole epochs as reach that number of steps. ``planned``: task ->
    the number of images that each of its phases would train on.
    """

    most_steps = 0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.planned: dict[int, list[int]] = {}

    def phases(self, task: Task) -> Iterator[Phase]:
        self.planned[task.index] = []  # also of a task that trains nothing
        for phase in super().phases(task):
            self.planned[task.index].append(phase.epochs * len(phase.indices))
            phase.epochs = min(phase.epochs, -(-self.most_steps // self.num_batches(len(phase.indices))))
            yield phase

    def training_batches(self, indices: np.ndarray, *address: Any, **options: Any) -> Iterator[Any]:
        return islice(super().training_batches(indices, *address, **options), self.most_steps)

    def steps_of(self, phase: Phase) -> int:
        """Optimiser steps that the phase takes."""
        return phase.epochs * min(self.num_batches(len(phase.indices)), self.most_steps)

    def end_task(self, task: Task) -> None:
        """Do nothing: the task is not trained to its end."""


class Stopwatch:
    """Receives the events of a :class:`Truncated` learner and times the steps of each phase after ``warm_up``."""

    def __init__(self, learner: Truncated, warm_up: int) -> None:
        self.learner, self.warm_up = learner, warm_up
        self.speeds: dict[tuple[int, int], float] = {}  # (task, number of its phase) -> seconds per image
        self.names: dict[tuple[int, int], str] = {}

    def task_started(self, task: Task) -> None: ...

    def task_trained(self, task: Task) -> None: ...

    def phase_started(self, task: Task, phase: Phase, first: int) -> None:
        self.steps, self.images, self.started = 0, 0, self._now()
        self.untimed = min(self.warm_up, self.learner.steps_of(phase) - 1)

    def step(self, images: int) -> None:
        self.steps += 1
        if self.steps > self.untimed:
            self.images += images
        elif self.steps == self.untimed:
            self.started = self._now()

    def epoch_ended(self, task: Task, number: int, phase: Phase, epoch: int, loss: float, accuracy: float) -> None:
        if self.images:
            self.speeds[task.index, number] = (self._now() - self.started) / self.images
            self.names[task.index, number] = phase.name

    def seconds_per_image(self) -> list[float]:
        """Seconds per image for each task, over all its phases; interpolated linearly between measured tasks."""
        return [
            sum(images * self._speed(task, number) for number, images in enumerate(phases)) / max(1, sum(phases))
            for task, phases in self.learner.planned.items()
        ]

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
        parts: dict[int, list[str]] = defaultdict(list)
        for (task, number), speed in self.speeds.items():
            parts[task].append(f"{self.names[task, number]} {1 / speed:,.0f}")
        tasks = (f"task {task + 1} {', '.join(phases)}" for task, phases in parts.items())
        return f"{'; '.join(tasks)} images/s"
