from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.methods.averaging.merging_learner import InterpolatingLearner
from pycil_wsc.registry import register_learner


@register_learner("wise_ft", epochs=70, milestones=[30, 50])
class WiSEFT(InterpolatingLearner):
    """WiSE-FT (Wortsman et al., CVPR 2022, https://arxiv.org/abs/2109.01903), with Replay.

    theta <- (1 - a) * theta_before + a * theta at the end of each later task, with the network before the task in the
    place of the paper's zero-shot model. The next task starts from the mean.
    """

    @dataclass(frozen=True)
    class Options:
        new_share: float = key(
            0.5,
            "fraction of the weights after the task (the paper's 0.5 without held-out data; its code tries 0 to 1)",
            low=0,
            high=1,
            decides="later tasks",
        )

    def merged(self, name: str, before: Tensor, now: Tensor) -> Tensor:
        return torch.lerp(before, now, self.config.options.new_share)
