from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.methods.replay.finetune import Finetune
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


@register_learner("lwf", init_milestones=[60, 120, 160], epochs=250, milestones=[60, 120, 180, 220], nme=False)
class LwF(DistillingLearner, Finetune):
    """Learning without Forgetting (Li and Hoiem, ECCV 2016, https://arxiv.org/abs/1606.09282), as in PyCIL.

    Finetune, with distillation of the old logits from the network before the task.
    """

    @dataclass(frozen=True)
    class Options:
        lamda: float = key(3.0, "weight of the distillation", low=0, decides="later tasks")
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        soft = self.teach(batch.images)
        loss, logits = super().loss(batch)
        if soft is not None:
            options = self.config.options
            loss = loss + options.lamda * distillation(logits[:, : self.num_old].float(), soft, options.T)
        return loss, logits
