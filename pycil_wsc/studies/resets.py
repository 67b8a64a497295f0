"""Reset rules that the paper compares with its own: new initial values, and shrink and perturb."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pycil_wsc.consolidation import Reset
from pycil_wsc.consolidation.ranking import check_share
from pycil_wsc.consolidation.trackers import Params

Fresh = Callable[[], Mapping[str, Tensor]]


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
