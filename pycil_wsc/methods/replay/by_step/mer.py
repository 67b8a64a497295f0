from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.keys import key
from pycil_wsc.methods.replay.er import ER
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments


@register_learner("mer", batch_size=1, epochs=70, milestones=[30, 50])
class MER(ER):
    """Meta-experience replay (Riemer et al., ICLR 2019, https://arxiv.org/abs/1810.11910), algorithm 6 as in Mammoth.

    One image a batch, and ER's step. The weights go back towards those before the step, so that ``beta`` of it is left,
    and after ``steps_per_batch`` steps towards those before the first of them, so that ``gamma`` is left.
    """

    @dataclass(frozen=True)
    class Options:
        beta: float = key(0.01, "fraction of a step that is kept (0.01 in Mammoth's mer.yaml)", low=0)
        gamma: float = key(0.03, "fraction that is kept of the steps on one batch (0.03 there)", low=0)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.before: list[Tensor] = []  # the weights before the step
        self.first: list[Tensor] = []  # those before the first step on the batch
        self.last = True  # whether the step is the last one on its batch

    def before_step(self, batch: Batch) -> Batch:
        self.before = [parameter.detach().clone() for parameter in self.network.parameters()]
        if self.last:
            self.first = self.before
        self.last = batch.entering is not None
        return batch

    @torch.no_grad()
    def after_step(self) -> None:
        options = self.config.options
        weights: list[Tensor] = list(self.network.parameters())
        torch._foreach_copy_(weights, torch._foreach_lerp(self.before, weights, options.beta))
        if self.last:
            torch._foreach_copy_(weights, torch._foreach_lerp(self.first, weights, options.gamma))
