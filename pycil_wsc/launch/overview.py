"""What a sweep shows: a line per task and per finished run and, on a terminal, a bar over all runs."""

import sys
import time
from collections import Counter
from dataclasses import dataclass

from tqdm import tqdm

from pycil_wsc.launch import interrupts
from pycil_wsc.launch.attempt import Job
from pycil_wsc.launch.status import counted
from pycil_wsc.runs.progress import Progress, duration


@dataclass
class Row:
    """A run in the overview, with its numbers of planned and processed training images."""

    planned: int
    images: int = 0
    state: str = "waiting"  # waiting, running, done, failed, or retry: failed, but will be tried again


class Overview:
    """Shows what the runs of a sweep report.

    The time left is estimated from the remaining images and the average speed of the sweep, which counts only images
    trained by this command.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.fresh = 0  # images trained by this command
        self.started: float | None = None  # time of the first progress
        self.bar: tqdm | None = None  # on a terminal

    def add(self, job: Job, planned: int) -> None:
        """Add an unfinished job with its cost in training images."""
        self.rows[job.number] = Row(planned)

    def skip(self, job: Job) -> None:
        """A job was finished before."""
        self.rows[job.number] = Row(0, state="done")

    def progress(self, job: Job, progress: Progress) -> None:
        interrupts.check()
        row = self.rows[job.number]
        if row.state != "running" or progress.loaded:  # what it resumes from was not trained by this command
            row.state = "running"
            row.images = progress.images
        if self.started is None:
            self.started = time.monotonic()
        self.fresh += max(0, progress.images - row.images)
        row.images = progress.images
        if progress.line:
            self.say(f"{job.title} {progress.line}; {self.left()} left")
        if sys.stderr.isatty():
            self._draw(f"{self.status()}; {job.title} {progress.position}, {progress.speed:,.0f} {progress.unit}/s")

    def ended(self, job: Job, state: str, line: str) -> None:
        """Set the state of a job: ``done``, ``failed``, ``retry``, or ``waiting`` again."""
        self.rows[job.number].state = state
        self.say(f"{job.title}  {line}; {self.status()}")

    def status(self) -> str:
        count = Counter("failed" if row.state == "retry" else row.state for row in self.rows.values())
        left = f", {self.left()} left" if {row.state for row in self.rows.values()} - {"done", "failed"} else ""
        return counted(count) + left

    def left(self) -> str:
        """Estimated time to the end of the sweep; ``?`` until this command has trained a thousandth of what is left.

        Before that, the time that start-up takes would be most of the estimate.
        """
        images = sum(row.planned - row.images for row in self.rows.values() if row.state not in ("done", "failed"))
        if self.started is None or not self.fresh or self.fresh < images / 1000:
            return "?"
        return duration(images * (time.monotonic() - self.started) / self.fresh)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _draw(self, text: str) -> None:
        if self.bar is None:
            total = sum(row.planned for row in self.rows.values())
            layout = "{percentage:3.0f}% {bar:20} {desc}"
            self.bar = tqdm(total=total, leave=False, desc=text, bar_format=layout, dynamic_ncols=True)
        self.bar.n = sum(row.planned if row.state == "done" else row.images for row in self.rows.values())
        self.bar.set_description_str(text)
