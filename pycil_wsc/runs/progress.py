"""What a run says while it lasts: its progress, several times a second, and its log."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pycil_wsc.errors import Unwritable

INTERVAL = 0.25  # seconds


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    ``images`` (or tokens) were processed since the run began; ``speed`` is per second. ``position`` is text, such as
    ``task 2/10, epoch 3/70``.
    """

    position: str
    images: int
    speed: float
    line: str = ""  # a line to print, such as the summary of a task
    loaded: bool = False  # the images so far were not trained by this command


class TaskBar:
    """Reports the progress of the tasks of a run.

    Calls ``on_progress`` with a :class:`Progress` at the start of each phase, at intervals, and for each line to print.
    """

    def __init__(self, on_progress: Callable[[Progress], None], num_tasks: int):
        self.on_progress = on_progress
        self.num_tasks = num_tasks
        self.task = ""  # such as "task 2/10"
        self.position = ""
        self.images = 0  # images that the run has trained on so far
        self.fresh = 0  # those of the current phase
        self.started = time.monotonic()  # when the phase began
        self.reported = 0.0

    def begin(self, index: int) -> None:
        """Task ``index`` begins."""
        self.task = self.position = f"task {index + 1}/{self.num_tasks}"

    def start(self, phase: str, first: int, epochs: int, images: int) -> None:
        """A phase of ``epochs`` epochs begins with epoch ``first``; the run has trained on ``images`` images so far."""
        loaded = self.images == 0  # the first phase here: an earlier command, or another run, has trained on `images`
        self.images = images
        self.fresh = 0
        self.started = time.monotonic()
        self.position = self.place(phase, min(first, epochs - 1), epochs)
        self._send(loaded=loaded)

    def step(self, images: int) -> None:
        self.images += images
        self.fresh += images
        if time.monotonic() - self.reported > INTERVAL:
            self._send()

    def at(self, position: str, images: int = 0) -> None:
        """The run is at this ``position`` of the task, after this many more ``images``."""
        self.position = f"{self.task} {position}"
        self.step(images)

    @property
    def speed(self) -> float:
        """Images per second since the phase began."""
        return self.fresh / max(time.monotonic() - self.started, 1e-9)

    def epoch(self, phase: str, epoch: int, epochs: int, loss: float, accuracy: float) -> None:
        """Epoch ``epoch`` has ended with this mean loss and training accuracy in percent."""
        now = self.place(phase, min(epoch + 1, epochs - 1), epochs)
        self.position = f"{now}, loss {loss:.3f}, accuracy {accuracy:.1f}%"

    def loaded(self, images: int) -> None:
        """The task was loaded from another run, which trained it on ``images`` images."""
        self.images = images
        self._send(loaded=True)

    def say(self, line: str) -> None:
        self._send(f"{self.task}  {line}")

    def place(self, phase: str, epoch: int, epochs: int) -> str:
        """An epoch of the task in words."""
        return f"{self.task} {phase} epoch {epoch + 1}/{epochs}"

    def _send(self, line="", loaded=False):
        self.reported = time.monotonic()
        self.on_progress(Progress(self.position, self.images, self.speed, line, loaded))


def print_task(progress: Progress) -> None:
    """The default ``on_progress`` of a single run: prints one line per task."""
    if progress.line:
        print(progress.line, flush=True)


def duration(seconds: float) -> str:
    """Seconds as ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class LogFile(logging.FileHandler):
    """The log of a run, which never fails it: what cannot be written, as on a full disk, is lost."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def log_file(folder: Path) -> Iterator[logging.Logger]:
    """A logger that appends to ``log.txt`` in a run's folder, until the end of the context."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = LogFile(folder / "log.txt", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise Unwritable(f"{folder}: cannot be written ({error.strerror}); choose another folder with --out") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.Logger("pycil_wsc.run")  # of this run alone
    log.addHandler(handler)
    try:
        yield log
    finally:
        handler.close()
