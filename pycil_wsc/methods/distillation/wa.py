from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


@register_learner("wa", epochs=170, milestones=[60, 100, 140])
class WA(DistillingLearner):
    """Weight aligning (Zhao et al., 2020): distillation weighted by the fraction of old classes, then a balanced head.

    After the task the head's new rows are scaled to the mean norm of the old ones.
    """

    @dataclass(frozen=True)
    class Options:
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")

    class Plan(DistillingLearner.Plan):
        plain_first_task = True
        needs_new_classes = True  # without them the loss is distillation alone

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        soft = self.teach(batch.images)
        logits = self.network(batch.images).float()
        loss = self.over.cross_entropy(logits, batch.targets)
        if soft is not None:
            old = self.num_old / self.num_seen
            loss = (1 - old) * loss + old * distillation(logits[:, : self.num_old], soft, self.config.options.T)
        return loss, logits

    def end_task(self, task: Task) -> None:
        if task.index:
            self.network.head.align(task.num_old)
