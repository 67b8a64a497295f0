from torch import Tensor

from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner("replay", epochs=70, milestones=[30, 50])
class Replay(BaseLearner):
    """Cross-entropy over all classes seen, on the new data and the exemplars, shuffled together."""

    class Plan(BaseLearner.Plan):
        plain_first_task = True

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits.float(), batch.targets), logits
