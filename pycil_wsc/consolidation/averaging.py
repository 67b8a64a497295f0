"""When the weights enter the average, and how much they weigh."""

from dataclasses import dataclass

from pycil_wsc.consolidation.resets import whole_steps

STARTS = ("reset", "first")
COUNTS = ("since_reset", "absolute", "swa")


@dataclass(frozen=True)
class Average:
    """The average Theta <- (n * Theta + theta) / (n + 1) of the weights theta from the end of the warm-up on.

    ``average=`` of :class:`~.wsc.WeightSpaceConsolidation`.

    Args:
        every: j, optimiser steps between two samples, counted from the reset (for ``"swa"`` from the task's start).
        start: the first sample. ``"reset"``: the weights just reset (after a warm-up of 0 steps, those at the start of
            the task); ``"first"``: the weights j steps later.
        count: what n is. ``"since_reset"``: the number of samples so far, for a plain mean. ``"absolute"``: the paper's
            n = i / j as written, with i counted from the task's start (a real number if j does not divide i).
            ``"swa"``: the same with samples where j divides i, as in stochastic weight averaging (Izmailov et al.,
            2018), so that n is whole. In the last two Theta begins as the reset weights, which weigh more than one
            sample; they need ``start="reset"``.
        last: add the last weights of the task if their step was not one of the sampled.
        buffers: average the buffers too. Needs ``named_buffers``; for batch norm
            :func:`~.batch_norm.recompute_batch_norm` is more accurate.

    Raises:
        ValueError: a value is out of range, unknown, or does not fit another.
    """

    every: int = 1
    start: str = "reset"
    count: str = "since_reset"
    last: bool = True
    buffers: bool = False

    def __post_init__(self) -> None:
        whole_steps("every", self.every, 1)
        for name, known in ("start", STARTS), ("count", COUNTS):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        if self.count != "since_reset" and self.start != "reset":
            raise ValueError(f"count={self.count!r} starts from the reset weights: it needs start='reset'")

    def due(self, step: int, warmup_steps: int) -> bool:
        """Whether the weights after step ``step`` of the task (0: before the first) enter the average."""
        since = step - warmup_steps
        if since <= 0:
            return since == 0 and self.start == "reset"
        return (step if self.count == "swa" else since) % self.every == 0

    def n(self, step: int, samples: int) -> float:
        """n for the sample at ``step`` of the task, when the average has ``samples`` samples."""
        return samples if self.count == "since_reset" else step / self.every

    def check_fits(self, steps: int, warmup_steps: int) -> None:
        """Raise ValueError if a task of ``steps`` optimiser steps would end without a sample."""
        if not self.last and self.start == "first" and steps < warmup_steps + self.every:
            raise ValueError(
                f"no sample of the average within the {steps} steps of the task: give a smaller `every`, or last=True"
            )
