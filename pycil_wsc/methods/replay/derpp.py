from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


@register_learner("derpp", epochs=70, milestones=[30, 50])
class DERpp(Replay):
    """Dark Experience Replay++ (Buzzega et al., NeurIPS 2020, https://arxiv.org/abs/2004.07211).

    Exemplars are replayed with their labels and with the logits that they had when they were chosen. The logits of
    classes that came later are not compared. Each term is a mean over its part of the batch, so that the fewer an
    image's own kind in the batch, the more it weighs.
    """

    @dataclass(frozen=True)
    class Options:
        alpha: float = key(
            0.1,
            "weight of the stored logits (0.1 in Mammoth's former list of values for CIFAR-100)",
            low=0,
            decides="later tasks",
        )
        beta: float = key(0.5, "weight of the exemplars' labels (0.5 in the same list)", low=0, decides="later tasks")

    class Plan(Replay.Plan):
        needs_exemplars = True

        def stored_bytes(self, num_seen: int) -> int:
            return 4 * num_seen  # float32 logits

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not len(self.memory):
            return super().loss(batch)
        logits = self.network(batch.images).float()
        smoothing = self.config.label_smoothing
        errors = cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        errors = self.weighted(errors)
        before = self.stored.of("logits", batch.indices)  # nan: no such class then
        known = before.isfinite()
        squares = (logits[:, : before.shape[1]] - before.nan_to_num()).square()
        distances = torch.where(known, squares, 0).sum(1) / known.sum(1).clamp(min=1)
        old, options = batch.from_memory, self.config.options
        loss = self.over.mean(errors, ~old) + options.beta * self.over.mean(errors, old)
        return loss + options.alpha * self.over.mean(distances, old), logits

    def after_memory(self, task: Task) -> None:
        new = self.stored.missing("logits", self.memory.indices)
        if len(new):
            self.stored.put("logits", new, self.outputs.logits(new))
