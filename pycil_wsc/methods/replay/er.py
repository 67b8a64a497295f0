from torch import Tensor

from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner("er", epochs=70, milestones=[30, 50])
class ER(BaseLearner):
    """Experience replay (Ratcliff, 1990; Riemer et al., ICLR 2019, https://arxiv.org/abs/1810.11910) as Mammoth has it.

    Cross-entropy over the batch and a batch that is drawn from a memory that each step fills.
    """

    class Plan(BaseLearner.Plan):
        memory_updates = ("step",)
        task_free = True

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        both = batch.joined()
        logits = self.network(both.images).float()
        return self.over.cross_entropy(logits, both.targets), logits[: len(batch)]
