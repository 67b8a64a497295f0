from dataclasses import dataclass

from torch import Tensor, nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.losses import newest_task_targets
from pycil_wsc.networks.nets import ExpandingNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner("der", epochs=170, milestones=[80, 120, 150])
class DER(BaseLearner):
    """Dynamically expandable representation (Yan et al., 2021) without masks, as in PyCIL: each task adds a backbone.

    The old backbones are frozen. An auxiliary head trains the newest one to distinguish the new classes from each other
    and from the old classes, which count as one class. After the task the head is aligned as in WA.
    """

    network: ExpandingNet

    @dataclass(frozen=True)
    class Options:
        alpha_aux: float = key(1.0, "weight of the auxiliary head's loss", low=0, decides="later tasks")
        align_head: bool = key(
            True, "align the head after a task, as PyCIL does and PILOT does not", decides="later tasks"
        )

    class Plan(BaseLearner.Plan):
        plain_first_task = True
        expands = True

    def build(self) -> nn.Module:
        return ExpandingNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        self.num_old = task.num_old
        self.network.grow(task.num_seen, task.num_new + 1)
        self.network.blocks[:-1].requires_grad_(False)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.network.extract(batch.images)
        logits = self.network.classify(features).float()
        loss = self.over.cross_entropy(logits, batch.targets)
        if self.num_old:
            newest = self.network.classify_newest(features).float()
            loss = loss + self.config.options.alpha_aux * self.over.cross_entropy(
                newest, newest_task_targets(batch.targets, self.num_old)
            )
        return loss, logits

    def end_task(self, task: Task) -> None:
        if task.index and task.num_new and self.config.options.align_head:
            self.network.head.align(task.num_old)
