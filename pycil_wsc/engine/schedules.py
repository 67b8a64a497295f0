"""Learning rates as pure functions of the epoch, so that going on after a stop needs no scheduler state."""

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]  # epoch -> learning rate


def step_lr(base: float, milestones: Sequence[int], decay: float) -> Schedule:
    """``base`` times ``decay`` for each milestone reached: PyCIL's schedule."""
    return lambda epoch: base * decay ** sum(epoch >= milestone for milestone in milestones)


def cosine_lr(base: float, epochs: int) -> Schedule:
    """From ``base`` to 0 along half a cosine in ``epochs`` epochs."""
    return lambda epoch: base * (1 + math.cos(math.pi * epoch / epochs)) / 2


def held_lr(schedule: Schedule, start: float, value: float, anneal: int) -> Schedule:
    """``schedule`` until epoch ``start``; then over to ``value`` along half a cosine in ``anneal`` epochs, and held
    there.
    """

    def rate(epoch):
        if epoch < start:
            return schedule(epoch)
        done = min(1, (epoch - start + 1) / anneal) if anneal else 1
        return value + (schedule(int(start) - 1) - value) * (1 + math.cos(math.pi * done)) / 2

    return rate
