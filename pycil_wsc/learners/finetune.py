from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.data.tasks import Task
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.registry import register_learner


@register_learner("finetune", epochs=80, milestones=[40, 70], nme=False)
class Finetune(BaseLearner):
    """No memory: cross-entropy over the new classes' logits, on the new data alone."""

    uses_memory = False
    plain_first_task = True

    def begin_task(self, task: Task) -> None:
        self.num_old = task.num_old

    def loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(images)
        return cross_entropy(logits[:, self.num_old :].float(), targets - self.num_old), logits
