"""Steps and epochs of a task from the options that give them as shares or in epochs."""

import math


def whole_part(share: float, number: int) -> int:
    """``share`` of ``number`` epochs or steps, rounded down.

    An error of floating-point arithmetic does not count: 0.7 of 170 is 119, not 118.
    """
    return math.floor(share * number + 1e-9)


def warmup_in_steps(share: float, epochs: int, per_epoch: int = 1, resets: bool = False) -> int:
    """The steps of a warm-up of this fraction of a task: whole epochs, or less than one.

    ``resets``: at least one step, to rank weights by. For a warm-up that is not counted in epochs, ``epochs`` is the
    number of steps of the task.
    """
    steps = whole_part(share, epochs) * per_epoch or whole_part(share, epochs * per_epoch)
    return max(1, steps) if resets else steps
