"""Reset rules: when to reset, and what happens to the elements that are not kept.

``reset=`` of :class:`WeightSpaceConsolidation` takes one of these. For another rule, derive from :class:`Reset`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pycil_wsc.consolidation.functional import blend_, revert_
from pycil_wsc.consolidation.ranking import check_share
from pycil_wsc.consolidation.trackers import Params


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Base class of the reset rules. A rule implements ``__call__``, and ``others`` if it needs new initial values.

    Args:
        every: optimiser steps between further resets; None for a single reset. The moments run on from reset to reset,
            and theta_prev remains the weights before the task.
        momentum: drop the optimiser's state of the parameters at each reset.
        buffers: reset the buffers too, without keeping any element. Needs ``named_buffers``.
        min_warmup: skip the reset, with a warning, if ``warmup_steps`` is smaller. In so short a task the network is
            far from trained and may lose more by the reset than it gains, above all with Adam.

    Raises:
        ValueError: ``every`` is not a whole number of at least 1, or ``min_warmup`` not one of at least 0.
    """

    every: int | None = None
    momentum: bool = False
    buffers: bool = False
    min_warmup: int = 0
    ranks: ClassVar[bool] = True  # False: nothing is kept, so no scores are needed
    needs_previous: ClassVar[bool] = True  # whether the rule uses the weights before the task

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole_steps("every", self.every, 1)
        check_whole_steps("min_warmup", self.min_warmup, 0)

    def __call__(self, params: list[Tensor], others: list[Tensor], keep: list[Tensor]) -> None:
        """Change ``params`` in place where ``keep`` (bool) is false.

        ``others``: what the method :meth:`others` returns; ``params`` themselves if that is nothing.
        """
        raise NotImplementedError

    def others(self, previous: Params) -> Params:
        """{name: values to combine the weights with}: by default, the weights before the task."""
        return previous

    def reset_buffers_(self, buffers: list[Tensor], previous: list[Tensor], keep: list[Tensor]) -> None:
        """Change ``buffers`` in place where ``keep`` is false: by default, back to ``previous``."""
        revert_(buffers, previous, keep)

    def due(self, since: int) -> bool:
        """Whether to reset ``since`` steps after the end of the warm-up."""
        return since == 0 or self.every is not None and since > 0 and since % self.every == 0


@dataclass(frozen=True)
class Blend(Reset):
    """theta <- blend * theta + (1 - blend) * theta_prev: the paper's reset, with its alpha as ``blend``.

    Args:
        blend: fraction of the current weights, 0..1.

    Raises:
        ValueError: ``blend`` is not in 0..1, or an argument of :class:`Reset` is out of range.
    """

    blend: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("blend", self.blend)

    def __call__(self, params: list[Tensor], others: list[Tensor], keep: list[Tensor]) -> None:
        blend_(params, others, keep, self.blend)

    def reset_buffers_(self, buffers: list[Tensor], previous: list[Tensor], keep: list[Tensor]) -> None:
        blend_(buffers, previous, keep, self.blend)


@dataclass(frozen=True)
class Revert(Reset):
    """theta <- theta_prev: back to the weights before the task.

    Raises:
        ValueError: an argument of :class:`Reset` is out of range.
    """

    def __call__(self, params: list[Tensor], others: list[Tensor], keep: list[Tensor]) -> None:
        revert_(params, others, keep)


def check_whole_steps(name: str, value: float, least: int) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of optimiser steps, at least {least}")
