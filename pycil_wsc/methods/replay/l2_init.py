import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.heads import part_of
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments


@register_learner("l2_init", epochs=70, milestones=[30, 50], init_weight_decay=0.0, weight_decay=0.0)
class L2Init(Replay):
    """Regenerative regularisation (Kumar et al., 2023, https://arxiv.org/abs/2308.11958), with Replay.

    The weights are drawn to their initial values, instead of to zero as by weight decay. The penalty is the squared
    distance itself, not half of it: its gradient is that of a weight decay of twice ``l2_init``.
    """

    @dataclass(frozen=True)
    class Options:
        l2_init: float = key(
            1e-3,
            "weight of the squared distance from the initial weights, which acts as a weight decay of twice this value "
            "(0.001 is our choice)",
            low=0,
        )

    class Plan(Replay.Plan):
        plain_first_task = False

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.initial: nn.Module | None = None  # a network with all initial values

    @torch.no_grad()
    def grow(self, task: Task) -> None:
        super().grow(task)
        grown = copy.deepcopy(self.network).requires_grad_(False)
        if self.initial is not None:
            for old, new in zip(self.initial.parameters(), grown.parameters(), strict=True):
                part_of(new, old).copy_(old)
        self.initial = grown

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, logits = super().loss(batch)
        assert self.initial is not None
        distance = torch.zeros((), device=self.device)
        for now, start in zip(self.network.parameters(), self.initial.parameters(), strict=True):
            distance = distance + (now - start).square().sum()
        return loss + self.config.options.l2_init * distance, logits
