"""Reset rules that the paper compares with its own: new initial values, and shrink and perturb."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from pycil_wsc.consolidation import Reset
from pycil_wsc.consolidation.ranking import check_share
from pycil_wsc.consolidation.trackers import Params
from pycil_wsc.registry import register_reset
from pycil_wsc.studies.rival_keys import RivalKeys

Fresh = Callable[[], Mapping[str, Tensor]]
Sum = Callable[[Tensor], object]


@dataclass(frozen=True)
class Training:
    """What a registered reset rule may use of the training of a task.

    Args:
        network: the network that is trained.
        units: for each layer of units, the names of its layers, as for :class:`~.continual_backprop.ContinualBackprop`.
        fresh: returns new initial values.
        every: steps between resets; None for a single one.
        options: the keys ``wsc.*``.
        sum_: sums a tensor over the processes, in place; None: there is one process.
    """

    network: nn.Module
    units: Sequence[tuple[str, str | None, str]]
    fresh: Fresh
    every: int | None
    options: RivalKeys
    sum_: Sum | None = None


@dataclass(frozen=True)
class Random(Reset):
    """theta <- new initial values.

    Args:
        fresh: function without arguments that returns {name: initial values}; called at each reset.
    """

    fresh: Fresh = field(repr=False, compare=False)
    needs_previous: ClassVar[bool] = False

    def others(self, previous: Params) -> Params:
        return self.fresh()

    def __call__(self, params: list[Tensor], others: list[Tensor], keep: list[Tensor]) -> None:
        for param, new, kept in zip(params, others, keep, strict=True):
            param.copy_(torch.where(kept, param, new))


@dataclass(frozen=True)
class ShrinkPerturb(Reset):
    """theta <- shrink * theta + perturb * fresh, for all elements: nothing is ranked or kept (Ash and Adams, 2020).

    Args:
        fresh: function without arguments that returns {name: initial values}; called at each reset.
        shrink: factor of the current weights, 0..1.
        perturb: factor of the initial values, at least 0.

    Raises:
        ValueError: ``shrink``, ``perturb`` or an argument of :class:`~pycil_wsc.consolidation.Reset` is out of range.
    """

    fresh: Fresh = field(repr=False, compare=False)
    shrink: float = 0.6
    perturb: float = 0.01
    ranks: ClassVar[bool] = False
    needs_previous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("shrink", self.shrink)
        if not self.perturb >= 0:
            raise ValueError(f"perturb={self.perturb!r} is a factor: give a number of at least 0")

    def others(self, previous: Params) -> Params:
        return self.fresh()

    def __call__(self, params: list[Tensor], others: list[Tensor], keep: list[Tensor]) -> None:
        for param, new, kept in zip(params, others, keep, strict=True):
            param.copy_(torch.where(kept, param, self.shrink * param + self.perturb * new))


@register_reset("random", ranks=True)
def random(training: Training) -> Random:
    """The elements that are not kept get new initial values."""
    return Random(training.fresh, every=training.every)


@register_reset("shrink_perturb", ranks=False)
def shrink_perturb(training: Training) -> ShrinkPerturb:
    """All elements are shrunk and perturbed."""
    options = training.options
    return ShrinkPerturb(training.fresh, options.shrink, options.perturb, every=training.every)
