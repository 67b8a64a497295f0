from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


@register_learner("icarl", epochs=170, milestones=[80, 120])
class ICaRL(DistillingLearner):
    """iCaRL (Rebuffi et al., 2017) with PyCIL's softmax losses: cross-entropy, and distillation of the old logits."""

    @dataclass(frozen=True)
    class Options:
        distill: float = key(1.0, "weight of the distillation", low=0, decides="later tasks")
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")

    class Plan(DistillingLearner.Plan):
        plain_first_task = True

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        soft, logits = self.teach(batch.images), self.network(batch.images).float()
        loss = self.cross_entropy(logits, batch.targets)
        if soft is not None:
            options = self.config.options
            loss = loss + options.distill * distillation(logits[:, : self.num_old], soft, options.T)
        return loss, logits
