"""Live progress: runs report it several times a second, and the overview of the sweep displays it."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pycil_wsc.errors import UserError
from pycil_wsc.runs import interrupts

INTERVAL = 0.25  # seconds


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    ``images`` (or tokens, see ``unit``) were processed since the run began; ``speed`` is per second. ``position`` is
    text, such as ``task 2/10, epoch 3/70``.
    """

    position: str
    images: int
    speed: float
    line: str = ""  # a line to print, such as the summary of a task
    loaded: bool = False  # the task was loaded from another run instead of being trained
    unit: str = "images"


class TaskBar:
    """Reports the progress of one task.

    Calls ``on_progress`` with a :class:`Progress` at the start of each phase, at intervals, and for each line to print.
    """

    def __init__(self, on_progress: Callable[[Progress], None], task: Any, num_tasks: int):
        self.on_progress, self.task = on_progress, f"task {task.index + 1}/{num_tasks}"
        self.position, self.images, self.fresh, self.started = self.task, 0, 0, time.monotonic()

    def start(self, phase: str, first: int, epochs: int, images: int) -> None:
        """A phase of ``epochs`` epochs begins with epoch ``first``; the run has trained on ``images`` images so far."""
        self.phase, self.epochs, self.images, self.fresh, self.started = phase, epochs, images, 0, time.monotonic()
        self.position = self._position(min(first, epochs - 1))
        self._send()

    def step(self, images: int) -> None:
        self.images += images
        self.fresh += images
        if time.monotonic() - self.reported > INTERVAL:
            self._send()

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        """Epoch ``epoch`` has ended with this mean loss and training accuracy in percent."""
        self.position = f"{self._position(min(epoch + 1, self.epochs - 1))}, loss {loss:.3f}, accuracy {accuracy:.1f}%"

    def loaded(self, images: int) -> None:
        """The task was loaded from another run, which trained it on ``images`` images."""
        self.images = images
        self._send(loaded=True)

    def say(self, line: str) -> None:
        self._send(f"{self.task}  {line}")

    def _position(self, epoch):
        return f"{self.task} {self.phase} epoch {epoch + 1}/{self.epochs}"

    def _send(self, line="", loaded=False):
        self.reported = time.monotonic()
        speed = self.fresh / max(self.reported - self.started, 1e-9)
        self.on_progress(Progress(self.position, self.images, speed, line, loaded))


def print_task(progress: Progress) -> None:
    """The default ``on_progress`` of a single run: prints one line per task."""
    if progress.line:
        print(progress.line, flush=True)


@dataclass
class Row:
    """A run in the overview, with its numbers of planned and processed training images."""

    planned: int
    images: int = 0
    state: str = "waiting"  # waiting, running, done, failed, or retry: failed, but will be tried again
    bar: tqdm | None = field(default=None, repr=False)


class Overview:
    """Displays all runs of a sweep.

    On a terminal, progress bars that stay in place; otherwise one line per task and per finished run. Jobs have a
    ``number`` and a ``title``. The time left is estimated from the remaining images and the average speed of the sweep,
    which counts only images trained by this command.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.fresh = 0  # images trained by this command
        self.started: float | None = None  # time of the first progress
        self.live, self.top = sys.stderr.isatty(), None

    def add(self, job: Any, planned: int) -> None:
        """Add an unfinished job with its cost in training images."""
        self.rows[job.number] = Row(planned)

    def skip(self, job: Any) -> None:
        """Add a job that was finished before."""
        self.rows[job.number] = Row(0, state="done")

    def progress(self, job: Any, progress: Progress) -> None:
        interrupts.check()
        row, now = self.rows[job.number], time.monotonic()
        if row.state != "running" or progress.loaded:
            row.state, row.images = "running", progress.images
        self.started = now if self.started is None else self.started
        self.fresh += max(0, progress.images - row.images)
        row.images = progress.images
        if progress.line:
            self.say(f"{job.title} {progress.line}; {self.left()} left")
        if self.live:
            if row.bar is None:
                row.bar = self._bar("{desc} {bar:20} {percentage:3.0f}%{postfix}", row.planned)
            left = duration((row.planned - row.images) / progress.speed) if progress.speed else "?"
            row.bar.n = min(row.images, row.planned)
            row.bar.set_description_str(f"{job.title} {progress.position}", refresh=False)
            row.bar.set_postfix_str(f"{progress.speed:,.0f} {progress.unit}/s, {left} left")
            self.draw()

    def ended(self, job: Any, state: str, line: str) -> None:
        """Set the state of a job: ``done``, ``failed``, ``retry``, or ``waiting`` again."""
        row = self.rows[job.number]
        row.state = state
        if row.bar is not None:
            row.bar.close()
            row.bar = None
        self.say(f"{job.title}  {line}; {self.status()}")

    def status(self) -> str:
        count = Counter(row.state for row in self.rows.values())
        failed = count["failed"] + count["retry"]
        left = f", {self.left()} left" if count["done"] + count["failed"] < len(self.rows) else ""
        done = f"done {count['done']}/{len(self.rows)}"
        return f"{done}, running {count['running']}, waiting {count['waiting']}, failed {failed}{left}"

    def left(self) -> str:
        """Estimated time to the end of the sweep; ``?`` until this command has trained a thousandth of what is left.

        Before that, the time that start-up takes would be most of the estimate.
        """
        images = sum(row.planned - row.images for row in self.rows.values() if row.state not in ("done", "failed"))
        if self.started is None or not self.fresh or self.fresh < images / 1000:
            return "?"
        return duration(images * (time.monotonic() - self.started) / self.fresh)

    def say(self, line: str) -> None:
        """Print a line above the progress bars."""
        if self.live:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
            self.draw()
        else:
            print(line, flush=True)

    def draw(self) -> None:
        if self.live:
            if self.top is None:
                self.top = self._bar("{desc}")
            self.top.set_description_str(self.status())

    def close(self) -> None:
        for bar in [*(row.bar for row in self.rows.values()), self.top]:
            if bar is not None:
                bar.close()

    def _bar(self, layout, total=None):
        return tqdm(total=total, leave=False, bar_format=layout, dynamic_ncols=True)


class Mailbox:
    """Stores the progress of runs on other machines until it is fetched."""

    def __init__(self) -> None:
        self.messages = []

    def put(self, message: Any) -> None:
        self.messages.append(message)

    def take(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages


def duration(seconds: float) -> str:
    """Seconds as ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def open_log(folder: Path) -> logging.Logger:
    """Create the run's own logger, which appends to ``log.txt`` in its folder until :func:`close_log`."""
    close_log(folder)
    log = _log_of(folder)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "log.txt", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder with --out") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    return log


def close_log(folder: Path) -> None:
    """Close the log of the run in ``folder``, if it is open."""
    log = _log_of(folder)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def _log_of(folder):
    return logging.getLogger(f"pycil_wsc.run.{folder}")
