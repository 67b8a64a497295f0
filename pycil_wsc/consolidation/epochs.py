"""Arguments of a consolidation in optimiser steps, from keys that count epochs."""

from typing import Any

from pycil_wsc.consolidation.averaging import Average, whole_part


def warmup_in_steps(share: float, epochs: int, per_epoch: int = 1, resets: bool = False) -> int:
    """The steps of a warm-up of this share of a task: whole epochs, or less than one.

    ``resets``: at least one step, to rank weights by. For a warm-up that is not counted in epochs, ``epochs`` is the
    number of steps of the task.
    """
    steps = whole_part(share, epochs) * per_epoch or whole_part(share, epochs * per_epoch)
    return max(1, steps) if resets else steps


def held_from(share: float, epochs: int, warmup_steps: int) -> int:
    """The epoch from which the learning rate is held, after a warm-up of this share: the first one after the reset.

    A warm-up of less than an epoch holds the rate from the next epoch on; without a warm-up, it is held from the start.
    """
    return max(1, whole_part(share, epochs)) if warmup_steps else 0


def steps_between(reset_every: str | int, per_epoch: int) -> int | None:
    """Optimiser steps between resets, or None for a single reset; ``reset_every``: the key ``wsc.reset_every``."""
    if isinstance(reset_every, str):
        return {"once": None, "epoch": per_epoch, "iteration": 1}[reset_every]
    return reset_every * per_epoch


def chosen_average(options: Any, per_epoch: int) -> Average | None:
    """The average that the keys ``wsc.average_*`` set, for epochs of ``per_epoch`` optimiser steps."""
    if not options.average:
        return None
    every, unit = options.average_every, per_epoch if options.average_unit == "epoch" else 1
    return Average(
        every=every if every < 1 else int(every) * unit,
        start=options.average_start,
        count=options.average_count,
        last=options.average_last,
        buffers=options.bn_update == "average",
        power=options.average_power,
    )
