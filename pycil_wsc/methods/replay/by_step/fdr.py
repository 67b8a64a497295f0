from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.batches.epoch_order import batch_slices, epoch_order
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.learner import Arguments, BaseLearner
from pycil_wsc.training.optimizers.parameter_groups import clip
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.replay_plan import entering_of, seed_of
from pycil_wsc.training.step.backward import Backward

AFTER = "after the task"  # the address of the pass that stores logits


@register_learner("fdr", epochs=70, milestones=[30, 50])
class FDR(BaseLearner):
    """Function distance regularisation (Benjamin et al., ICLR 2019, https://arxiv.org/abs/1805.08289) as in Mammoth.

    A step on the batch is followed by one towards the class probabilities that drawn exemplars had after their task.

    As in Mammoth: task t, counted from 0, leaves the first ``memory_size`` / t exemplars of each earlier task, and as
    many of its own images then enter the reservoir, so that the tasks' shares are unequal; the logits are those of
    augmented images in training mode, whose pass also moves the statistics of batch norm.
    """

    @dataclass(frozen=True)
    class Options:
        alpha: float = key(
            1.0,
            "weight of the distance; Mammoth's argument of this name is not read, as if it were 1",
            low=0,
            decides="later tasks",
        )

    class Plan(BaseLearner.Plan):
        memory_updates = ("step",)
        fills_by_step = False
        measures_quotas = True  # how many exemplars a task leaves depends on which others the reservoir has dropped

        def stored_bytes(self, num_seen: int) -> int:
            return 4 * num_seen  # float32 logits

        def presented(self, task: Task) -> np.ndarray:
            return task.train_indices[: self.config.memory_size // max(1, task.index)]

    memory: StreamMemory

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.optimizer_of_phase: Optimizer | None = None

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            self.optimizer_of_phase = phase.optimizer
            yield phase

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images).float()
        smoothing = self.config.label_smoothing
        errors = cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        return self.over.mean(errors, batch=batch), logits

    def distance(self, drawn: Batch) -> tuple[Tensor, Tensor]:
        """The mean Euclidean distance between the probabilities of now and of then."""
        logits = self.network(drawn.images).float()
        stored = drawn.stored["logits"]
        known = stored.isfinite()  # nan: there was no such class then
        before = torch.where(known, stored, torch.finfo(stored.dtype).min).softmax(1)
        distances = (logits[:, : before.shape[1]].softmax(1) - before).norm(dim=1)
        alpha = self.config.options.alpha
        return alpha * self.over.mean(distances, batch=drawn), logits

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        """Take the step on the batch; the loop takes the second one."""
        for drawn in batch.replay:
            assert self.optimizer_of_phase is not None
            clip(self.optimizer_of_phase, self.config.clip_norm)
            self.optimizer_of_phase.step()
            backward(drawn, self.distance)

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        size = self.memory.size
        share = size // max(1, task.index)
        self._keep_first_of_each_task(share)
        self._store(task, share)

    def _keep_first_of_each_task(self, share: int) -> None:
        """Reduce the memory to the first ``share`` exemplars of each task."""
        tasks = self.manager.train_tasks[self.memory.slots]
        kept = [np.flatnonzero(tasks == number)[:share] for number in np.unique(tasks)]
        self.memory.select(np.concatenate([np.empty(0, np.int64), *kept]))

    @torch.no_grad()
    def _store(self, task: Task, share: int) -> None:
        """Let the first ``share`` images of another epoch enter, with their logits."""
        config = self.config
        order = epoch_order(task.train_indices, True, seed_of(config, "batches", task.index, AFTER))
        rng = np.random.default_rng(seed_of(config, "stream", task.index, AFTER))
        slices = batch_slices(len(order), config.batch_size, join=True)
        batches = self.batches.of(Sampling(indices=task.train_indices, mixed=False), task.index, AFTER)
        self.network.train()
        seeded = seeding.seeded(config.seed, "dropout", task.index, AFTER, device=self.device)
        with synced_batch_norm(self.processes), seeded:
            for part, batch in zip(slices, batches, strict=False):
                with self.precision.autocast():
                    logits = self.network(batch.images).float()
                left = share - part.start
                if left < 0:
                    return
                samples = order[part]
                labels = self.manager.train_targets[samples]
                places = self.memory.choose(labels[:left], rng)
                entering = entering_of(samples[:left], labels[:left], places, self.processes, self.device)
                entering.into(self.memory, {"logits": logits}, self.processes)
