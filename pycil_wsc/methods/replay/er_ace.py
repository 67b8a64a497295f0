import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


@register_learner("er_ace", epochs=70, milestones=[30, 50])
class ERACE(Replay):
    """ER with asymmetric cross-entropy (Caccia et al., ICLR 2022, https://arxiv.org/abs/2104.05025).

    The task's own images compete only among the classes that are in the batch with them, so that new classes do not
    push the old ones away; exemplars compete among all classes. Each of the two losses is a mean over its part of the
    batch. The first task, without exemplars, is plain.
    """

    class Plan(Replay.Plan):
        needs_exemplars = True

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not len(self.memory):
            return super().loss(batch)
        logits = self.network(batch.images).float()
        new = ~batch.from_memory
        present = logits.new_zeros(logits.shape[1]).index_add(0, batch.targets, new.to(logits.dtype))
        present = self.processes.sum_(present) > 0
        among_new = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        smoothing = self.config.label_smoothing
        own = cross_entropy(among_new, batch.targets, reduction="none")
        replayed = cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        own, replayed = self.weighted(own), self.weighted(replayed)
        return self.over.mean(own, new) + self.over.mean(replayed, batch.from_memory), logits
