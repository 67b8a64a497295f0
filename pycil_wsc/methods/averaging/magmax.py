from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.consolidation.model_merging import MagMaxMerge, Merge
from pycil_wsc.keys import key
from pycil_wsc.methods.averaging.merging_learner import TaskVectorLearner
from pycil_wsc.registry import register_learner


@register_learner("magmax", epochs=70, milestones=[30, 50])
class MagMax(TaskVectorLearner):
    """MagMax (Marczak et al., ECCV 2024, https://arxiv.org/abs/2407.06322), with Replay.

    Of the backbone's changes in all later tasks, each element's largest is added to its weight after the first task.
    """

    @dataclass(frozen=True)
    class Options:
        magmax_scale: float = key(
            0.5, "factor of the largest changes (0.5 in the authors' code)", low=0, decides="later tasks"
        )

    def new_merge(self, start: Mapping[str, Tensor]) -> Merge:
        return MagMaxMerge(start, scale=self.config.options.magmax_scale)
