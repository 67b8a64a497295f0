"""How long training takes on this machine: a few steps of each method and phase, timed in the loop of real runs."""

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

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.options import Config
from pycil_wsc.data.loader import open_source
from pycil_wsc.data.tasks import Task, tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.engine.environment import deterministic, resolved_device
from pycil_wsc.engine.phase import Phase
from pycil_wsc.errors import UserError
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.runs.planning import plan_of

WARM_UP, TIMED = 5, 5  # steps of a phase: until caches are full and a CUDA graph is recorded, and those that count
UNFELT = {  # keys that a step's time does not depend on, beside those that decide names and files
    *(
        "seed",
        "shuffle",
        "memory_size",
        "memory_per_class",
        "memory_bytes",
        "exemplars",
        "validation_split",
        "nme",
        "momentum",
    ),
    *("init_lr", "init_milestones", "init_lr_decay", "init_weight_decay", "scheduler"),
    *("lrate", "milestones", "lrate_decay", "weight_decay"),
    *("wsc.retain", "wsc.blend", "wsc.betas", "wsc.warmup"),
}


def measurer() -> Callable[[Config, Dataset], float]:
    """A function from a configuration and its data to the seconds that the training of a whole run takes here.

    Runs whose steps take equally long share a measurement. Tests, the choice of exemplars, resets and saving are not
    measured.
    """
    known: dict[str, list[float]] = {}

    def seconds(config: Config, dataset: Dataset) -> float:
        felt = {name: value for name, value in config.to_dict().items() if _is_felt(name, config)}
        same = json.dumps(felt, sort_keys=True)
        if same not in known:
            known[same] = _measured(config, dataset)
        return sum(
            images * each for images, each in zip(plan_of(config, tasks_of(dataset, config)), known[same], strict=True)
        )

    return seconds


def _is_felt(name: str, config: Config) -> bool:
    return name not in UNFELT and config.keys[name].decides not in ("name", "files")


def _measured(config: Config, dataset: Dataset) -> list[float]:
    """Seconds per training image of each task. Prints the speeds."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or threads)
        watch = measure(config, dataset)
    except UserError:
        raise
    except Exception as error:  # such as a GPU without enough memory
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--measure: {config.method} cannot be trained here ({what})") from error
    finally:
        torch.set_num_threads(threads)
    print(f"measured {config.method}: {watch}", flush=True)
    return watch.seconds_per_image()


def measure(config: Config, dataset: Dataset) -> Stopwatch:
    """Train a few steps of each phase of the first, the second and the last task.

    The data, the networks and the batches are those of the run; exemplars are chosen at random, which is sooner done.
    Nothing is written.
    """
    if config.exemplars == "herding":
        config = dataclasses.replace(config, exemplars="random")
    deterministic(config.deterministic)
    device = resolved_device(config.device)
    keep_freed_memory(device)
    manager = tasks_of(dataset, config)
    source = open_source(dataset.info, dataset.train, device, config.num_workers)
    learner = truncated(config.learner)(config, manager, source, device)
    decoded_ahead = 0 if dataset.train.in_memory else 2 * config.num_workers  # batches, when the first step begins
    watch = Stopwatch(learner, WARM_UP + decoded_ahead)
    for task in manager.tasks:
        chosen = task.index in (0, 1, len(manager.tasks) - 1)
        learner.most_steps = watch.warm_up + TIMED if chosen else 0
        learner.learn(task, watch)
    return watch


@functools.cache
def truncated(learner: type[BaseLearner]) -> Any:
    """The class ``learner``, whose phases end after ``most_steps`` steps."""
    return type(f"Truncated{learner.__name__}", (Truncated, learner), {})


class Truncated(BaseLearner):
    """Mixed in before a learner: each phase takes at most ``most_steps`` steps, unless an epoch has fewer batches.

    Then it takes as many whole epochs as reach that. ``planned`` are the images that each phase would train on, by
    task.
    """

    most_steps = 0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.planned: dict[int, list[int]] = defaultdict(list)

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            self.planned[task.index].append(phase.epochs * len(phase.indices))
            phase.epochs = min(phase.epochs, -(-self.most_steps // self.num_batches(len(phase.indices))))
            yield phase

    def training_batches(self, indices: np.ndarray, *address: Any) -> Iterator[Any]:
        return islice(super().training_batches(indices, *address), self.most_steps)

    def steps_of(self, phase: Phase) -> int:
        """Optimiser steps that the phase takes."""
        return phase.epochs * min(self.num_batches(len(phase.indices)), self.most_steps)

    def end_task(self, task: Task) -> None:
        """Nothing: a task of a few steps is not to be finished."""


class Stopwatch:
    """Follows a :class:`Truncated` learner as a run does, and times the steps of each phase after ``warm_up``."""

    def __init__(self, learner: Truncated, warm_up: int) -> None:
        self.learner, self.warm_up = learner, warm_up
        self.speeds: dict[tuple[int, int], float] = {}  # (task, number of its phase) -> seconds per image
        self.names: dict[tuple[int, int], str] = {}

    def task_started(self, task: Task) -> None: ...

    def task_trained(self, task: Task) -> None: ...

    def phase_started(self, task: Task, phase: Phase, first: int) -> None:
        self.steps, self.images, self.begun = 0, 0, self._now()
        self.uncounted = min(self.warm_up, self.learner.steps_of(phase) - 1)

    def step(self, images: int) -> None:
        self.steps += 1
        if self.steps > self.uncounted:
            self.images += images
        elif self.steps == self.uncounted:
            self.begun = self._now()

    def epoch_ended(self, task: Task, number: int, phase: Phase, epoch: int, loss: float, accuracy: float) -> None:
        if self.images:
            self.speeds[task.index, number] = (self._now() - self.begun) / self.images
            self.names[task.index, number] = phase.name

    def seconds_per_image(self) -> list[float]:
        """For each task, over all its phases. Between measured tasks, a phase's time is on a straight line."""
        return [
            sum(images * self._speed(task, number) for number, images in enumerate(phases)) / sum(phases)
            for task, phases in self.learner.planned.items()
        ]

    def _speed(self, task: int, number: int) -> float:
        known = {at: speed for (at, phase), speed in self.speeds.items() if phase == number and bool(at) == bool(task)}
        if not known:  # a phase that none of the measured tasks has
            return self._speed(task, 0)
        return float(np.interp(task, list(known), list(known.values())))

    def _now(self) -> float:
        """The time at which the device has done all that it was given."""
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize(self.learner.device)
        return time.perf_counter()

    def __str__(self) -> str:
        parts: dict[int, list[str]] = defaultdict(list)
        for (task, number), speed in self.speeds.items():
            parts[task].append(f"{self.names[task, number]} {1 / speed:,.0f}")
        tasks = (f"task {task + 1} {', '.join(phases)}" for task, phases in parts.items())
        return f"{'; '.join(tasks)} images/s"
