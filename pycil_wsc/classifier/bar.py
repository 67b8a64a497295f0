"""Shows the progress of a :class:`pycil_wsc.Learner`."""

from __future__ import annotations

from tqdm import tqdm

from pycil_wsc.runs.progress import Progress


class Bar:
    """Shows the progress of one task: a progress bar on a terminal, and lines."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.before = quiet, 0
        self.bar: tqdm | None = None

    def begin(self, plan: list[int]) -> None:
        """Start the bar of the last task; ``plan``: training images of each task."""
        self.before = sum(plan[:-1])
        self.bar = tqdm(total=plan[-1], unit=" images", leave=False, disable=True if self.quiet else None)

    def __call__(self, progress: Progress) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.set_description_str(progress.position, refresh=False)
            self.bar.update(progress.images - self.before - self.bar.n)
        if progress.line and not self.quiet:
            tqdm.write(progress.line)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
