"""Options of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of a report.

    Args:
        spread: what ± and error bars show: the standard error of the mean (``se``) or the standard deviation (``sd``).
        baseline: the method that the others are compared with over equal seeds.
        labels: pairs of a shell pattern and a display name for methods and data sets that match it.
        paper: show the paper's numbers beside ours.
        all_figures: also draw the figures that are omitted from the report of a large sweep.
    """

    spread: str = "se"
    baseline: str = "replay"
    labels: tuple[tuple[str, str], ...] = ()
    paper: bool = True
    all_figures: bool = False

    @property
    def spread_name(self) -> str:
        return {"se": "standard error", "sd": "standard deviation"}[self.spread]


DEFAULT = Options()
