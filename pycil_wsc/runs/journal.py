"""What a run tells of itself: times, memory, a line per task, curves, scalars, its log and its progress."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from pycil_wsc.config.image_config import Config
from pycil_wsc.devices import peak_memory
from pycil_wsc.errors import TrainingDiverged
from pycil_wsc.files import Json, write_atomically
from pycil_wsc.results.schema import HUGE
from pycil_wsc.runs.progress import Progress, TaskBar, log_file
from pycil_wsc.runs.scalars import Scalars
from pycil_wsc.state import State
from pycil_wsc.training.phase import PhaseRun

CURVES = ("train_loss", "train_accuracy")


class Journal:
    """The records of a run in ``folder``, which only one of its processes ``writes``.

    Args:
        folder: the folder of the run's files.
        on_progress: called with every :class:`pycil_wsc.runs.progress.Progress`.
        num_tasks: the number of tasks of the run.
        writes: whether this process writes files; the others only count.
        curves: what is recorded for each epoch of a task.
    """

    def __init__(
        self,
        folder: Path,
        on_progress: Callable[[Progress], None],
        num_tasks: int,
        writes: bool,
        curves: Sequence[str] = CURVES,
    ) -> None:
        self.folder = folder
        self.writes = writes
        self.bar = TaskBar(on_progress, num_tasks)
        self.log = logging.getLogger("pycil_wsc.following")  # replaced by the run's own log, once that is opened
        self.scalars: Scalars | None = None
        self.history: list[dict[str, Json]] = []  # the lines of metrics.jsonl: a dict per task
        self.curves = new_curves(curves)  # of the current task: a value per epoch
        self.clock = {"train_seconds": 0.0, "total_seconds": 0.0, "saved_seconds": 0.0}
        self.mark = time.perf_counter()  # up to which the clock has counted
        self.peak_memory = 0  # in bytes, up to the last `note_memory`

    def open_log(self, files: contextlib.ExitStack) -> None:
        """Begin to write the log, until ``files`` closes."""
        if self.writes:
            self.log = files.enter_context(log_file(self.folder))

    def open_scalars(self, config: Config, files: contextlib.ExitStack) -> None:
        """Begin to write scalars, until ``files`` closes; those beyond the present state are discarded."""
        if self.writes and (config.tensorboard or config.wandb):
            self.scalars = Scalars(config, self.folder, self.history, self.curves)
            files.callback(self.scalars.close)

    def tick(self, *names: str) -> float:
        """Add the time since the last tick to the total and to the named clocks; returns it in seconds."""
        now = time.perf_counter()
        seconds = now - self.mark
        self.mark = now
        for name in {"total_seconds", *names}:
            self.clock[name] += seconds
        return seconds

    def note_memory(self, device: torch.device) -> None:
        """Bring ``peak_memory`` up to date."""
        self.peak_memory = max(self.peak_memory, peak_memory(device))

    def say(self, line: str) -> None:
        """Write a line to the log, and report it."""
        self.log.info("%s %s", self.bar.task, line)
        self.bar.say(line)

    def resumed(self, run: PhaseRun) -> None:
        """The run goes on within a phase."""
        phase = run.phase
        first = run.first
        ended = first == run.epochs  # stopped while exemplars were chosen, or in the test
        where = f"after {phase.name} epoch {first}" if ended else f"with {phase.name} epoch {first + 1}"
        self.say(f"resumes {where}/{run.epochs}")

    def epoch_ended(self, run: PhaseRun, epoch: int, loss: float, accuracy: float) -> None:
        """An epoch has ended; accuracy in percent. Raises :class:`TrainingDiverged` if the loss is not finite."""
        seconds = self.tick("train_seconds")
        phase = run.phase
        self.bar.epoch(phase.name, epoch, run.epochs, loss, accuracy)
        where = self.bar.place(phase.name, epoch, run.epochs)
        self.log.info("%s: loss %.4f, train accuracy %.2f", where, loss, accuracy)
        check_loss(loss, f"{self.bar.task}, epoch {epoch + 1}")
        group = phase.optimizer.param_groups[0]
        rate = group["lr"] / (group.get("lr_scale") or 1.0)  # the learning rate of the schedule
        speed = len(phase.indices) / max(seconds, 1e-9)  # a coarse clock may not have moved
        if self.scalars:
            self.scalars.epoch_ended(loss=loss, accuracy=accuracy, learning_rate=rate, images_per_second=speed)
        self.curves["train_loss"].append(loss)
        self.curves["train_accuracy"].append(accuracy)

    def check(self, finite: bool, what: str) -> None:
        """Raise :class:`TrainingDiverged` unless ``what`` the task has left is ``finite``."""
        if not finite:
            raise TrainingDiverged(
                f"{what} are no longer finite numbers after {self.bar.task}; try a lower learning rate"
            )

    def task_loaded(self, trained: State, images: int) -> None:
        """The task was taken from another run, whose records are ``trained``; ``images`` were trained on so far.

        It counts as if this run had trained it.
        """
        seconds = trained["clock"]["train_seconds"]
        self.log.info("%s taken from a run that shares it, %.1f s saved", self.bar.task, seconds)
        for name in ("train_seconds", "total_seconds", "saved_seconds"):
            self.clock[name] += seconds
        self.curves = trained["curves"]
        self.peak_memory = max(self.peak_memory, trained["peak_memory"])
        if self.scalars:
            self.scalars.epochs_ended(self.curves)
        self.bar.loaded(images)

    def task_ended(self, line: Mapping[str, Json]) -> None:
        """A task was learned and tested; ``line``: what is known of it beside its curves and times."""
        self.tick()
        self.history.append({**line, **self.curves, **self.clock})
        self.curves = new_curves(self.curves)
        if self.writes:
            lines = [json.dumps(line) + "\n" for line in self.history]
            write_atomically(self.folder / "metrics.jsonl", "".join(lines))
        if self.scalars:
            self.scalars.task_ended(self.history)

    def state_dict(self) -> State:
        return {"history": self.history, "curves": self.curves, "clock": self.clock, "peak_memory": self.peak_memory}

    def load_state_dict(self, state: State) -> None:
        self.history = state["history"]
        self.curves = state["curves"]
        self.clock = state["clock"]
        self.peak_memory = state["peak_memory"]


def new_curves(names: Iterable[str] = CURVES) -> dict[str, list[float]]:
    return {name: [] for name in names}


def check_loss(loss: float, where: str) -> None:
    """Raise :class:`TrainingDiverged` unless the loss of an epoch is finite, and small enough for a result."""
    if not abs(loss) < HUGE:
        raise TrainingDiverged(f"the loss became {loss} in {where}; try a lower learning rate")


def summary(line: Mapping[str, Json]) -> str:
    """A line of ``metrics.jsonl`` in words."""
    accuracy = f"loss {line['train_loss'][-1]:.3f}" if line["train_loss"] else "not trained"
    if "cnn_top1" in line:
        nme = f", NME {line['nme_top1']:.2f}" if "nme_top1" in line else ""
        accuracy = f"CNN {line['cnn_top1']:.2f}{nme}, newest task {line['cnn_tasks'][-1]:.2f}"
    return f"{line['num_seen']} classes: {accuracy}, {line['exemplars']} exemplars"
