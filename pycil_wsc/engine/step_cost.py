"""The arithmetic cost of a training step, independent of the machine and its load."""

import contextlib
from collections.abc import Iterator

from torch.utils.flop_counter import FlopCounterMode


class Untracked:
    """Replaces torch's tracker of modules, as only totals are needed.

    The tracker fails where a module without gradients receives a view of a trainable parameter.
    """

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


class StepCost:
    """Floating-point operations per image of a phase, counted in its first step.

    Counts the forward and backward passes of convolutions and matrix products, including teachers and frozen parts; a
    multiplication and an addition are two operations.
    """

    per_image: int | None = None

    @property
    def unknown(self) -> bool:
        return self.per_image is None

    @contextlib.contextmanager
    def measured(self, images: int) -> Iterator[None]:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = Untracked()  # pyright: ignore[reportAttributeAccessIssue]
        with counter:
            yield
        self.per_image = counter.get_total_flops() // max(1, images)
