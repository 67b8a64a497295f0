from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.consolidation.model_merging import Merge, TiesMerge
from pycil_wsc.keys import key
from pycil_wsc.methods.averaging.merging_learner import TaskVectorLearner
from pycil_wsc.registry import register_learner


@register_learner("ties", epochs=70, milestones=[30, 50])
class TIES(TaskVectorLearner):
    """TIES-Merging (Yadav et al., NeurIPS 2023, https://arxiv.org/abs/2306.01708), with Replay.

    Of the backbone's change in each later task, the largest elements are kept; each element's sign is that of its sum
    over tasks, and the mean of the changes with this sign is added to its weight after the first task.
    """

    @dataclass(frozen=True)
    class Options:
        ties_keep: float = key(
            0.2,
            "fraction of each task's changes that is kept (20 % in the paper and its code)",
            above=0,
            high=1,
            decides="later tasks",
        )
        ties_scale: float = key(
            1.0,
            "factor of the merged change (the paper's 1 without held-out data; its code tries 0.8 to 2.5 on such data)",
            low=0,
            decides="later tasks",
        )

    def new_merge(self, start: Mapping[str, Tensor]) -> Merge:
        options = self.config.options
        return TiesMerge(start, scale=options.ties_scale, keep=options.ties_keep)
