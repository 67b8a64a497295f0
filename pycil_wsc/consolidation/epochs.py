"""Arguments of a consolidation in optimiser steps, from keys that count epochs."""

from typing import Any

from pycil_wsc.consolidation.averaging import Average


def warmup_in_steps(share: float, epochs: int, per_epoch: int) -> int:
    """The steps of a warm-up of this share of a task: whole epochs, or less than one."""
    return int(share * epochs) * per_epoch or int(share * epochs * per_epoch)


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
