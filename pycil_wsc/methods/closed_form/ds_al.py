from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.acil import ACIL, AnalyticHead
from pycil_wsc.networks.closed_form_nets import ComputedHead, RidgeSums, without_empty
from pycil_wsc.registry import register_learner


class DualStreamHead(AnalyticHead):
    """A regression on relu(x P), and one on tanh(x P) of what the first leaves over.

    The logits are relu(x P) V + ``ratio`` tanh(x P) W, whose weights [V, ratio W] are ``weight``.
    """

    def __init__(self, width: int, size: int, options: "DSAL.Options", dtype: torch.dtype):
        super().__init__(width, size, options.gamma, dtype)
        self.compensation = RidgeSums(size, options.gamma_comp, dtype)
        self.ratio = options.compensation_ratio
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
        projected = self.project(features.to(self.sums.products))
        residuals = self.sums.one_hot(labels) - projected.relu() @ self.sums.solution()
        residuals[:, : self.first] = 0  # previous label cleansing
        self.compensation.add_rows(projected.tanh(), residuals)

    def solve(self) -> None:
        weights = [self.sums.solution(), self.ratio * self.compensation.solution()]
        self.weight = torch.cat(weights).T.float().contiguous()
        self.bias = without_empty(torch.zeros_like(self.bias), self.sums.counts)


@register_learner("ds-al", init_epoch=160, init_milestones=[120, 140], nme=False)
class DSAL(ACIL):
    """DS-AL (Zhuang et al., AAAI 2024): ACIL, with a second regression that compensates for what the first misses.

    What an image adds to the second one depends on the images before it, so it cannot be taken out again.
    """

    takes_out = False

    @dataclass(frozen=True)
    class Options(ACIL.Options):
        gamma_comp: float = key(0.1, "ridge parameter of the compensation", above=0)
        compensation_ratio: float = key(0.6, "weight of the compensation in the logits", low=0)

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        return DualStreamHead(width, self.config.options.buffer_size, self.config.options, dtype)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.network.head.first = self.manager.first_class(task)
