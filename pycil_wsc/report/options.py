"""How a report is made, whatever runs it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How to write a report.

    ``spread``: what ± and error bars show, the standard error of the mean (``se``) or the standard deviation (``sd``).
    ``baseline``: the method that the others are compared with, seed by seed. ``labels``: pairs of a shell pattern and
    the name to show for the methods and data sets that match it. ``paper``: whether to show the paper's numbers beside
    ours. ``all_figures``: whether to draw those too that a wide sweep's reader seldom wants.
    """

    spread: str = "se"
    baseline: str = "replay"
    labels: tuple[tuple[str, str], ...] = ()
    paper: bool = True
    all_figures: bool = False

    @property
    def spread_name(self) -> str:
        return {"se": "standard error", "sd": "standard deviation"}[self.spread]


USUAL = Options()
