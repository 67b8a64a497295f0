from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.networks.closed_form_nets import ComputedHead, RidgeSums, SummedHead, Sums, without_empty
from pycil_wsc.registry import register_learner


class AnalyticHead(SummedHead):
    """Ridge regression with parameter ``gamma`` on relu(x P) for a random matrix P (d, ``size``)."""

    projection: Tensor

    def __init__(self, width: int, size: int, gamma: float, dtype: torch.dtype):
        super().__init__(size, width)
        self.register_buffer("projection", torch.empty(width, size).uniform_(-(width**-0.5), width**-0.5))
        self.sums = RidgeSums(size, gamma, dtype)

    def grow(self, num_classes: int) -> None:
        self.sums.grow(num_classes)
        super().grow(num_classes)

    def project(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, size), in the dtype of the features."""
        return features @ self.projection.to(features)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.project(features.float()).relu())

    def sums_of(self, features: Tensor) -> Iterator[tuple[Sums, Tensor, Tensor]]:
        every = torch.ones(len(features), dtype=torch.bool, device=features.device)
        yield self.sums, every, self.project(features.to(self.sums.products)).relu()

    def solve(self) -> None:
        self.weight = self.sums.solution().T.float().contiguous()
        self.bias = without_empty(torch.zeros_like(self.bias), self.sums.counts)


@register_learner("acil", init_epoch=160, init_milestones=[120, 140], nme=False)
class ACIL(ClosedForm):
    """ACIL (Zhuang et al., NeurIPS 2022): ridge regression on random features of what learned the first task.

    PyCIL updates the inverse of the features' autocorrelation by each batch. The sums here give the same weights, to
    rounding, and take fewer operations: those of many images are factorised, and few images update the factor.
    """

    @dataclass(frozen=True)
    class Options:
        buffer_size: int = key(8192, "number of random features", low=1, high=2**20)
        gamma: float = key(0.1, "ridge parameter", above=0)
        IL_batch_size: int = key(4096, "images whose features are added at once", low=1)
        inplace_repeat: int = key(1, "number of times that each image is added", low=1)

    class Plan(ClosedForm.Plan):
        def adapts(self) -> bool:
            return True

    @property
    def part(self) -> int:
        return self.config.options.IL_batch_size

    @property
    def repeats(self) -> int:
        return self.config.options.inplace_repeat

    def images_of(self, task: Task) -> np.ndarray:
        return np.repeat(super().images_of(task), self.repeats)

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        options = self.config.options
        return AnalyticHead(width, options.buffer_size, options.gamma, dtype)
