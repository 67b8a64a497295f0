"""Learning rates as pure functions of the epoch, so that resuming needs no scheduler state.

An epoch may be a fraction: with ``schedule_unit`` "iteration" the rate is set before each step.
"""

import math
from collections.abc import Callable, Sequence

from pycil_wsc.training.learner_config import ScheduleOptions

Schedule = Callable[[float], float]  # epoch -> learning rate


def task_schedule(config: ScheduleOptions, first: bool, epochs: int, interval: float) -> Schedule:
    """The learning rate in a task of ``epochs`` epochs, for a rate that is set every ``interval`` epochs.

    ``first``: whether this is the first task, whose keys begin with ``init``.
    """
    base, milestones, decay = (
        (config.init_lr, config.init_milestones, config.init_lr_decay)
        if first
        else (config.lrate, config.milestones, config.lrate_decay)
    )
    if config.scheduler == "cosine":
        schedule = cosine_lr(base, epochs, config.min_lr, config.warmup_epochs)
    elif config.scheduler == "restarts":
        schedule = restarting_lr(base, config.min_lr)
    else:
        schedule = step_lr(base, milestones, decay)
    return warmed_lr(schedule, config.warmup_epochs, interval)


def step_lr(base: float, milestones: Sequence[int], decay: float) -> Schedule:
    """``base``, multiplied by ``decay`` at each milestone: PyCIL's schedule."""
    return lambda epoch: base * decay ** sum(epoch >= milestone for milestone in milestones)


def cosine_lr(base: float, epochs: int, min_lr: float = 0.0, start: int = 0) -> Schedule:
    """From ``base`` at epoch ``start`` to ``min_lr`` at epoch ``epochs`` along half a cosine."""
    return lambda epoch: min_lr + (base - min_lr) * (1 + math.cos(math.pi * (epoch - start) / (epochs - start))) / 2


def restarting_lr(base: float, min_lr: float = 0.0) -> Schedule:
    """A tenth of ``base`` for an epoch and ``base`` for one, then half cosines to ``min_lr`` over 2, 4, 8, ... epochs.

    GDumb's schedule: ``CosineAnnealingWarmRestarts(T_0=1, T_mult=2)`` from the second epoch on.
    """

    def rate(epoch):
        if epoch < 1:
            return base / 10
        length = 2 ** math.floor(math.log2(epoch))
        return min_lr + (base - min_lr) * (1 + math.cos(math.pi * (epoch - length) / length)) / 2

    return rate


def warmed_lr(schedule: Schedule, warmup: int, interval: float = 1.0) -> Schedule:
    """``schedule`` after a linear warm-up of ``warmup`` epochs.

    The rate is set every ``interval`` epochs. In the warm-up it rises in equal steps, from one step above 0 to the rate
    of ``schedule`` at its end, like ``torch.optim.lr_scheduler.LinearLR`` with the same number of steps.
    """
    if not warmup:
        return schedule

    def rate(epoch):
        return schedule(warmup) * (epoch + interval) / (warmup + interval) if epoch < warmup else schedule(epoch)

    return rate


def held_lr(schedule: Schedule, start: float, value: float, anneal: int, interval: float = 1) -> Schedule:
    """``schedule`` until epoch ``start``, then along half a cosine to ``value`` in ``anneal`` epochs, then constant.

    The rate is set every ``interval`` epochs. The half cosine begins with the last rate before ``start``, or with the
    first rate if ``start`` is 0; the rate at ``start`` is already one interval along it.
    """

    def rate(epoch):
        if epoch < start:
            return schedule(epoch)
        done = min(1, (epoch - start + interval) / anneal) if anneal else 1
        return value + (schedule(max(0, start - interval)) - value) * (1 + math.cos(math.pi * done)) / 2

    return rate
