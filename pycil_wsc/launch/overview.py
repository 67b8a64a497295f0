"""The overview of a sweep: it displays what its runs report."""

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tqdm import tqdm

from pycil_wsc.launch import interrupts
from pycil_wsc.launch.attempt import Job
from pycil_wsc.runs.progress import Progress, duration


@dataclass
class Row:
    """A run in the overview, with its numbers of planned and processed training images."""

    planned: int
    images: int = 0
    state: str = "waiting"  # waiting, running, done, failed, or retry: failed, but will be tried again
    bar: tqdm | None = field(default=None, repr=False)


class Overview:
    """Displays all runs of a sweep.

    On a terminal, progress bars that stay in place; otherwise one line per task and per finished run. The time left is
    estimated from the remaining images and the average speed of the sweep, which counts only images trained by this
    command.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.fresh = 0  # images trained by this command
        self.started: float | None = None  # time of the first progress
        self.live, self.top = sys.stderr.isatty(), None

    def add(self, job: Job, planned: int) -> None:
        """Add an unfinished job with its cost in training images."""
        self.rows[job.number] = Row(planned)

    def skip(self, job: Job) -> None:
        """Add a job that was finished before."""
        self.rows[job.number] = Row(0, state="done")

    def progress(self, job: Job, progress: Progress) -> None:
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
            seconds = progress.seconds_left(row.planned)
            left = "?" if seconds is None else duration(seconds)
            row.bar.n = min(row.images, row.planned)
            row.bar.set_description_str(f"{job.title} {progress.position}", refresh=False)
            row.bar.set_postfix_str(f"{progress.speed:,.0f} {progress.unit}/s, {left} left")
            self.draw()

    def ended(self, job: Job, state: str, line: str) -> None:
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
