from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner("finetune", epochs=80, milestones=[40, 70], nme=False)
class Finetune(BaseLearner):
    """No memory: cross-entropy on the new data alone, over the logits of the task.

    These are the logits of its first class, in learning order, and of all later classes.
    """

    class Plan(BaseLearner.Plan):
        uses_memory = False
        plain_first_task = True

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits[:, self.first :].float(), batch.targets - self.first), logits
