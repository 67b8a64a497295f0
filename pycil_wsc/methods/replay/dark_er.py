from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.keys import key
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner("dark_er", epochs=70, milestones=[30, 50])
class DarkER(BaseLearner):
    """Dark Experience Replay (Buzzega et al., NeurIPS 2020, https://arxiv.org/abs/2004.07211): Mammoth's ``der``.

    Cross-entropy over the batch, and the squared distance of a replayed batch's logits from those that the network gave
    when the images entered the memory, augmented as they then were.
    """

    @dataclass(frozen=True)
    class Options:
        alpha: float = key(0.3, "weight of the stored logits (0.3 in Mammoth's list of values for CIFAR-100)", low=0)

    class Plan(BaseLearner.Plan):
        memory_updates = ("step",)
        task_free = True

        def stored_bytes(self, num_seen: int) -> int:
            return 4 * num_seen  # float32 logits

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images).float()
        loss = self.over.mean(self.over.cross_entropy(logits, batch.targets, reduction="none"), batch=batch)
        for replayed in batch.replay:
            distances = squared_distances(self.network(replayed.images).float(), replayed.stored["logits"])
            loss = loss + self.config.options.alpha * self.over.mean(distances, batch=batch)
        return loss, logits

    def to_store(self, batch: Batch, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits}


def squared_distances(logits: Tensor, before: Tensor) -> Tensor:
    """The mean squared distance of each image's logits (B, classes) from earlier ones, (B, at most as many): (B,).

    Over the classes that there were then; of others, ``before`` is nan.
    """
    known = before.isfinite()
    squares = (logits[:, : before.shape[1]] - before.nan_to_num()).square()
    return torch.where(known, squares, 0).sum(1) / known.sum(1).clamp(min=1)
