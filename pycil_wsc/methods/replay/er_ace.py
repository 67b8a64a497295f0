from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.heads import RowsHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.replay_plan import Draw


@register_learner("er_ace", epochs=70, milestones=[30, 50])
class ERACE(Replay):
    """ER with asymmetric cross-entropy (Caccia et al., ICLR 2022, https://arxiv.org/abs/2104.05025) as Mammoth has it.

    The batch's own images compete only among the classes that are in the batch, and those that are newer than all
    classes seen so far, so that they do not push older ones away; a replayed batch competes among all classes. Nothing
    is replayed in the first task, which is plain, unless ``task_free`` is set.

    With ``memory_update`` "task", exemplars are among the images of a batch, each of the two losses is a mean over its
    part of it, and new images compete among the new classes of the batch alone.
    """

    @dataclass(frozen=True)
    class Options:
        classifier: str | None = key(
            None,
            "`linear`, or `cosine` (10 times the cosine of features and rows); null: `cosine` with `memory_update` "
            "`step`, as in Mammoth, else `linear`",
            choices=(None, "linear", "cosine"),
        )
        task_free: bool = key(
            False,
            "with `memory_update` `step`: replay from the first step on, not from the second task on",
            decides="later tasks",  # with `step`, no method shares the first one
        )

    class Plan(Replay.Plan):
        needs_exemplars = True
        memory_updates = ("step", "task")

        @property
        def task_free(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.config.options.task_free

        def draws(self, task: Task) -> tuple[Draw, ...]:
            return (Draw(),) if task.index or self.config.options.task_free else ()

    newest: Tensor

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        if self.config.by_step:
            self.register_buffer("newest", torch.zeros((), dtype=torch.int64, device=self.device))

    def build(self) -> IncrementalNet:
        chosen = self.config.options.classifier
        cosine = self.config.by_step if chosen is None else chosen == "cosine"
        return IncrementalNet(self.new_backbone(), FixedCosineHead) if cosine else super().build()

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.plain = task.index == 0 and not self.config.options.task_free

    def before_step(self, batch: Batch) -> Batch:
        """Note the newest class that has been in a batch, and add the classes of this one: bool (classes,)."""
        if not self.config.by_step:
            return batch
        present = torch.zeros(self.network.head.out_features, device=self.device)
        present.index_fill_(0, batch.targets, 1.0)
        present = self.processes.sum_(present) > 0
        numbers = torch.arange(len(present), device=self.device)
        self.newest.copy_(torch.maximum(self.newest, torch.where(present, numbers, 0).max()))
        return replace(batch, drawn=(*batch.drawn, present | (numbers >= self.newest)))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.config.by_step:
            return self.mixed_loss(batch)
        *_, among = batch.drawn
        logits = self.network(batch.images).float()
        masked = logits if self.plain else logits.masked_fill(~among, torch.finfo(logits.dtype).min)
        loss = self.over.mean(cross_entropy(masked, batch.targets, reduction="none"), batch=batch)
        for replayed in batch.replay:
            errors = self.over.cross_entropy(self.network(replayed.images).float(), replayed.targets, reduction="none")
            loss = loss + self.over.mean(errors, batch=batch)
        return loss, logits

    def mixed_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With ``memory_update`` "task": the loss of a batch that has exemplars among its images."""
        if not len(self.memory):
            return super().loss(batch)
        logits = self.network(batch.images).float()
        new = ~batch.from_memory
        present = logits.new_zeros(logits.shape[1]).index_add(0, batch.targets, new.to(logits.dtype))
        present = self.processes.sum_(present) > 0
        among_new = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        of_new = cross_entropy(among_new, batch.targets, reduction="none")
        replayed = self.over.cross_entropy(logits, batch.targets, reduction="none")
        of_new, replayed = self.over.weighted(of_new), self.over.weighted(replayed)
        return self.over.mean(of_new, new) + self.over.mean(replayed, batch.from_memory), logits


class FixedCosineHead(RowsHead):
    """``scale`` times the cosine of the features and each row, without a bias, as Mammoth's ER-ACE has it.

    0.00001 is added to each norm.
    """

    def __init__(self, in_features: int, out_features: int = 0, scale: float = 10.0):
        super().__init__(in_features)
        self.scale = scale
        self.grow(out_features)

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, classes) logits."""
        features = features / (features.norm(dim=1, keepdim=True) + 0.00001)
        rows = self.weight / (self.weight.norm(dim=1, keepdim=True) + 0.00001)
        return self.scale * (features @ rows.T)
