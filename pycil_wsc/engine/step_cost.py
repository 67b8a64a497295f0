"""The arithmetic cost of a training step, independent of the machine and its load."""

import contextlib
from collections.abc import Iterator

from torch.utils.flop_counter import FlopCounterMode


class StepCost:
    """Floating-point operations per image of one phase's steps, counted once, in its first step.

    Forward and backward passes through convolutions and matrix products, teachers and frozen parts included; a
    multiplication and an addition are two.
    """

    per_image = None

    @property
    def unknown(self) -> bool:
        return self.per_image is None

    @contextlib.contextmanager
    def measured(self, images: int) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        self.per_image = counter.get_total_flops() // max(1, images)
