from dataclasses import dataclass

from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.dark_er import squared_distances
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.replay_plan import Draw


@register_learner("derpp", epochs=70, milestones=[30, 50])
class DERpp(Replay):
    """Dark Experience Replay++ (Buzzega et al., NeurIPS 2020, https://arxiv.org/abs/2004.07211) as Mammoth has it.

    Two batches are replayed in each step: one with the logits that the network gave when the images entered the memory,
    and one with their labels.

    With ``memory_update`` "task", exemplars are replayed with their labels and with the logits that they had when they
    were chosen. The logits of classes that came later are not compared. Each term is a mean over its part of the batch,
    so that the fewer an image's own kind in the batch, the more it weighs.
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
        memory_updates = ("step", "task")
        task_free = True

        def stored_bytes(self, num_seen: int) -> int:
            return 4 * num_seen  # float32 logits

        def draws(self, task: Task) -> tuple[Draw, ...]:
            return (Draw(), Draw())

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.config.by_step:
            return self.mixed_loss(batch)
        options = self.config.options
        logits = self.network(batch.images).float()
        loss = self.over.mean(self.over.cross_entropy(logits, batch.targets, reduction="none"), batch=batch)
        if batch.replay:
            first, second = batch.replay
            distances = squared_distances(self.network(first.images).float(), first.stored["logits"])
            errors = self.over.cross_entropy(self.network(second.images).float(), second.targets, reduction="none")
            loss = loss + options.alpha * self.over.mean(distances, batch=batch)
            loss = loss + options.beta * self.over.mean(errors, batch=batch)
        return loss, logits

    def to_store(self, batch: Batch, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits}

    # ---- with memory_update "task" -----------------------------------------------------------------------------------

    def mixed_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a batch that has exemplars among its images."""
        if not len(self.memory):
            return super().loss(batch)
        logits = self.network(batch.images).float()
        errors = self.over.weighted(self.over.cross_entropy(logits, batch.targets, reduction="none"))
        distances = squared_distances(logits, self.memory.stored.of("logits", batch.indices))
        old, options = batch.from_memory, self.config.options
        loss = self.over.mean(errors, ~old) + options.beta * self.over.mean(errors, old)
        return loss + options.alpha * self.over.mean(distances, old), logits

    def after_memory(self, task: Task) -> None:
        if self.config.by_step:
            return
        new = self.memory.stored.missing("logits", self.memory.indices)
        if len(new):
            self.memory.stored.put("logits", new, self.outputs.logits(new))
