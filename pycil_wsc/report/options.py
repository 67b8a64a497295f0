"""How a report is made, whatever runs it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """``spread``: what ± and error bars are, the standard error of the mean (``se``) or the standard deviation (``sd``).

    ``baseline``: the method that the others are compared with, seed by seed. ``labels``: pairs of a pattern, as in a shell, and
    the name to show for the methods and data sets that it fits. ``paper``: whether the paper's numbers stand beside ours.
    """

    spread: str = "se"
    baseline: str = "replay"
    labels: tuple[tuple[str, str], ...] = ()
    paper: bool = True

    @property
    def spread_name(self) -> str:
        return {"se": "standard error", "sd": "standard deviation"}[self.spread]


USUAL = Options()
