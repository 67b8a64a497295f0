"""When the weights are sampled for the average, and how much each sample weighs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pycil_wsc.consolidation.epochs import whole_part
from pycil_wsc.consolidation.resets import check_whole_steps

STARTS = ("reset", "first")
COUNTS = ("late", "since_reset", "absolute", "swa")

# n of Theta <- (n * Theta + theta) / (n + 1), from the step of the task, the samples so far and the steps between two
Weighting = Callable[[int, int, int], float]


def late(power: float) -> Weighting:
    """Late samples weigh more: the k-th about ``k ** power``."""
    return lambda step, samples, interval: samples / (power + 1)


def since_reset(step: int, samples: int, interval: int) -> float:
    """A plain mean of the samples."""
    return samples


def since_task(step: int, samples: int, interval: int) -> float:
    """The paper's n = i / j, with i counted from the task's start."""
    return step / interval


@dataclass(frozen=True)
class Average:
    """The average of the weights theta after the warm-up: Theta <- (n * Theta + theta) / (n + 1).

    ``average=`` of :class:`WeightSpaceConsolidation`.

    Args:
        every: j, optimiser steps between two samples, counted from the reset (for ``"swa"`` from the task's start).
            A value below 1 is a fraction of the warm-up steps, at least one step.
        start: the first sample. ``"reset"``: the weights right after the reset (without a warm-up, the weights at the
            start of the task); ``"first"``: the weights j steps later.
        count: how n is counted. ``"late"``: the number of samples so far, divided by ``power + 1``, so that late
            samples weigh more: the k-th about ``k ** power`` (polynomial-decay averaging, Shamir and Zhang, 2013). The
            average lags behind training by ``1 / (power + 2)`` of the steps since the reset, however many there are.
            ``"since_reset"``: the number of samples so far, for a plain mean. ``"absolute"``: the paper's n = i / j as
            written, with i counted from the task's start (a real number if j does not divide i). ``"swa"``: the same,
            sampled at the steps that j divides, as in stochastic weight averaging (Izmailov et al., 2018), so that n is
            an integer. With the last two, Theta starts as the reset weights, which count as more than one sample; they
            need ``start="reset"``.
        last: add the last weights of the task if they were not sampled.
        buffers: average the buffers too. Needs ``named_buffers``; for batch norm
            :func:`~.batch_norm.recompute_batch_norm` is more accurate.
        power: exponent of ``count="late"``; 0 is a plain mean.
        weighting: n as a function of the step of the task, the samples so far and the steps between two samples,
            instead of ``count``. As with ``fresh`` of a reset, a saved state does not hold it.

    Raises:
        ValueError: a value is unknown, out of range, or inconsistent with another.
    """

    every: int | float = 0.01
    start: str = "reset"
    count: str = "late"
    last: bool = True
    buffers: bool = False
    power: float = 3.0
    weighting: Weighting | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.every, float) and 0 < self.every < 1):
            check_whole_steps("every", self.every, 1)
        for name, known in ("start", STARTS), ("count", COUNTS):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        if self.count in ("absolute", "swa") and self.start != "reset":
            raise ValueError(f"count={self.count!r} starts from the reset weights: it needs start='reset'")
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power={self.power!r}: give a number of at least 0")

    def interval(self, warmup_steps: int) -> int:
        """Optimiser steps between two samples."""
        return int(self.every) if self.every >= 1 else max(1, whole_part(self.every, warmup_steps))

    def due(self, step: int, warmup_steps: int) -> bool:
        """Whether the weights after step ``step`` of the task (0: before the first) enter the average."""
        since = step - warmup_steps
        if since <= 0:
            return since == 0 and self.start == "reset"
        return (step if self.count == "swa" else since) % self.interval(warmup_steps) == 0

    def n(self, step: int, samples: int, warmup_steps: int) -> float:
        """n for the sample at ``step`` of the task, when the average has ``samples`` samples already."""
        weighting = self.weighting or self._named_weighting()
        return weighting(step, samples, self.interval(warmup_steps))

    def _named_weighting(self) -> Weighting:
        if self.count == "late":
            return late(self.power)
        return since_reset if self.count == "since_reset" else since_task

    def check_fits(self, steps: int, warmup_steps: int) -> None:
        """Raise ValueError if a task of ``steps`` optimiser steps would end without a sample."""
        if not self.last and self.start == "first" and steps < warmup_steps + self.interval(warmup_steps):
            raise ValueError(
                f"no sample of the average within the {steps} steps of the task: give a smaller `every`, or last=True"
            )
