"""What a sweep shows: a line per task and per finished run and, on a terminal, a bar over all runs."""

import sys
import time
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from pycil_wsc.config.kinds import kind_of
from pycil_wsc.launch import interrupts
from pycil_wsc.launch.attempt import Job
from pycil_wsc.launch.status import counted
from pycil_wsc.runs.progress import Progress, duration


class Overview:
    """Shows what the runs of a sweep, ``jobs``, report, and keeps their states.

    The time left is estimated from the remaining images and the average speed of the sweep, which counts only images
    trained by this command.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.fresh = 0  # images trained by this command
        self.started: float | None = None  # time of the first progress
        self.bar: tqdm | None = None  # on a terminal

    def progress(self, job: Job, progress: Progress) -> None:
        interrupts.check()
        if job.state != "running" or progress.loaded:  # what it resumes from was not trained by this command
            job.state = "running"
            job.images = progress.images
        if self.started is None:
            self.started = time.monotonic()
        self.fresh += max(0, progress.images - job.images)
        job.images = progress.images
        if progress.line:
            self.say(f"{job.title} {progress.line}{self._left('; ')}")
        if sys.stderr.isatty():
            speed = f"{progress.speed:,.0f} {kind_of(job.config).unit}/s"
            self._draw(f"{self.status()}; {job.title} {progress.position}, {speed}")

    def ended(self, job: Job, state: str, line: str) -> None:
        """Set the state of a job: ``done``, ``failed``, ``retry``, or ``waiting`` again."""
        job.state = state
        self.say(f"{job.title}  {line}; {self.status()}")

    def status(self) -> str:
        states = Counter(job.state for job in self.jobs)
        left = self._left(", ") if states.keys() - {"done", "failed"} else ""
        states["failed"] += states.pop("retry", 0)
        return counted(states) + left

    def left(self) -> str:
        """Estimated time to the end of the sweep; ``?`` until this command has trained a thousandth of what is left.

        Before that, the time that start-up takes would be most of the estimate.
        """
        images = sum(max(0, job.planned - job.images) for job in self.jobs if job.state not in ("done", "failed"))
        if self.started is None or not self.fresh or self.fresh < images / 1000:
            return "?"
        return duration(images * (time.monotonic() - self.started) / self.fresh)

    def _left(self, separator: str) -> str:
        """The time left, to end a line; empty if it is not known yet."""
        left = self.left()
        return "" if left == "?" else f"{separator}{left} left"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _draw(self, text: str) -> None:
        if self.bar is None:
            total = sum(job.planned for job in self.jobs)
            layout = "{percentage:3.0f}% {bar:20} {desc}"
            self.bar = tqdm(total=total, leave=False, desc=text, bar_format=layout, dynamic_ncols=True)
        self.bar.n = sum(job.planned if job.state == "done" else job.images for job in self.jobs)
        self.bar.set_description_str(text)
