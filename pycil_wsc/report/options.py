"""Options of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of a report."""

    spread: str = "se"  # what ± and error bars show: the standard error of the mean, or the standard deviation (sd)
    baseline: str = "replay"  # the method that the others are compared with over equal seeds
    labels: tuple[tuple[str, str], ...] = ()  # a shell pattern and the display name of methods or data sets it matches
    paper: bool = True  # show the paper's numbers beside ours
    all_figures: bool = False  # also draw the figures that are omitted from the report of a large sweep

    @property
    def spread_name(self) -> str:
        return {"se": "standard error", "sd": "standard deviation"}[self.spread]


DEFAULT = Options()
