"""Shows the progress of a :class:`pycil_wsc.Learner`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tqdm import tqdm

from pycil_wsc.runs.progress import Progress

LOG = logging.getLogger("pycil_wsc.learner")


class ProgressBar:
    """Shows the progress of one task: a progress bar on a terminal, and lines, which the log gets too.

    Args:
        quiet: show nothing.
        on_progress: called with each :class:`~pycil_wsc.runs.progress.Progress`, several times a second.
    """

    def __init__(self, quiet: bool, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.quiet = quiet
        self.on_progress = on_progress
        self.before = 0  # images of earlier tasks
        self.bar: tqdm | None = None

    def begin(self, plan: list[int]) -> None:
        """Start the bar of the last task; ``plan``: training images of each task."""
        self.before = sum(plan[:-1])
        self.bar = tqdm(total=plan[-1], unit=" images", leave=False, disable=True if self.quiet else None)

    def __call__(self, progress: Progress) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.set_description_str(progress.position, refresh=False)
            self.bar.update(progress.images - self.before - self.bar.n)
        if progress.line:
            self.say(progress.line)
        if self.on_progress:
            self.on_progress(progress)

    def say(self, line: str) -> None:
        """Log a line, and print it unless quiet."""
        LOG.info("%s", line)
        if not self.quiet:
            tqdm.write(line)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
