from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.acil import ACIL, AnalyticHead
from pycil_wsc.networks.closed_form import ComputedHead, Sums, ridge_regression
from pycil_wsc.registry import register_learner


class DualStreamHead(AnalyticHead):
    """A regression on relu(x P), and one on tanh(x P) of what the first leaves over.

    The logits are relu(x P) V + ``ratio`` tanh(x P) W, whose weights [V, ratio W] are ``weight``.
    """

    def __init__(self, width: int, size: int, options: "DSAL.Options", dtype: torch.dtype):
        super().__init__(width, size, options.gamma, dtype)
        self.compensation = Sums(size, dtype)
        self.gamma_comp, self.ratio = options.gamma_comp, options.compensation_ratio
        self.weight = torch.zeros(0, 2 * size)
        self.first = 0  # the first class of the task

    def grow(self, num_classes: int) -> None:
        self.compensation.grow(num_classes)
        super().grow(num_classes)

    def forward(self, features: Tensor) -> Tensor:
        projected = self.project(features.float())
        return ComputedHead.forward(self, torch.cat([projected.relu(), projected.tanh()], 1))

    def add(self, features: Tensor, labels: Tensor) -> None:
        """As in PyCIL the residuals of a part are those of the first regression on all parts up to it."""
        super().add(features, labels)
        projected = self.project(features.to(self.sums.gram))
        main = ridge_regression(self.sums.gram, self.sums.products, self.gamma)
        residuals = self.sums.one_hot(labels) - projected.relu() @ main
        residuals[:, : self.first] = 0  # previous label cleansing
        self.compensation.add(projected.tanh(), residuals)

    def solve(self) -> None:
        main = ridge_regression(self.sums.gram, self.sums.products, self.gamma)
        compensation = ridge_regression(self.compensation.gram, self.compensation.products, self.gamma_comp)
        self.weight = torch.cat([main, self.ratio * compensation]).T.float().contiguous()


@register_learner("ds-al", init_epoch=160, init_milestones=[120, 140], nme=False)
class DSAL(ACIL):
    """DS-AL (Zhuang et al., AAAI 2024): ACIL, with a second regression that compensates for what the first misses."""

    @dataclass(frozen=True)
    class Options(ACIL.Options):
        gamma_comp: float = key(0.1, "ridge parameter of the compensation", above=0)
        compensation_ratio: float = key(0.6, "weight of the compensation in the logits", low=0)

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        return DualStreamHead(width, self.config.options.buffer_size, self.config.options, dtype)

    def begin_task(self, task: Task) -> None:
        self.network.head.first = self.first_class(task)
