"""Weight Space Consolidation over a learner that trains one network in one phase per task."""

import functools

import torch

from pycil_wsc.consolidation import WeightSpaceConsolidation, recompute_batch_norm
from pycil_wsc.learners.schedules import held_lr
from utils.loader import num_batches


@functools.cache
def consolidated(learner):
    """The class ``learner`` with consolidation on top."""
    return type(f"Consolidated{learner.__name__}", (Consolidated, learner), {})


class Consolidated:
    """Mixed in before a learner: its training phase is followed by a :class:`WeightSpaceConsolidation` with the keys ``wsc.*``."""

    consolidates = True
    consolidation = None  # of the task under way

    @property
    def plain_first_task(self):
        return super().plain_first_task and not self.config.wsc.first_task

    def phases(self, task):
        for phase in super().phases(task):
            if task.index or self.config.wsc.first_task:
                self._consolidate(task, phase)
            yield phase

    def _consolidate(self, task, phase):
        options, per_epoch = self.config.wsc, num_batches(len(phase.indices), self.config.batch_size)
        epochs = int(options.warmup * phase.epochs)
        steps = epochs * per_epoch or int(options.warmup * phase.epochs * per_epoch)  # less than an epoch: in steps
        self.consolidation = WeightSpaceConsolidation(
            self.network.named_parameters(),
            warmup_steps=steps if options.reset == "none" else max(1, steps),
            average_every=options.average_every * (per_epoch if options.average_unit == "epoch" else 1),
            retain=options.retain,
            blend=options.blend,
            betas=options.betas,
            score_abs=options.score_abs,
            rank_scope=options.rank_scope,
            reset=options.reset,
            reset_every={"once": None, "epoch": per_epoch, "iteration": 1}[options.reset_every],
            reset_momentum=options.reset_momentum,
            average=options.average,
            average_start=options.average_start,
            average_count=options.average_count,
            average_last=options.average_last,
            named_buffers=self.network.named_buffers(),
            reset_buffers=options.reset_buffers,
            average_buffers=options.bn_update == "average",
            eligible=None if options.reset_new_rows else self._old_rows(task),
        ).attach(phase.optimizer)
        if options.average and options.average_lr is not None:
            phase.lr = held_lr(phase.lr, max(1, epochs), options.average_lr, options.average_anneal)

    def _old_rows(self, task):
        head = self.network.head.named_parameters(prefix="head")
        return {name: (torch.arange(len(p), device=p.device) < task.num_old).view(-1, *[1] * (p.dim() - 1)).expand_as(p) for name, p in head}

    def end_task(self, task):
        if self.consolidation:
            self.consolidation.finish()
            self.consolidation.detach()
            if self.config.wsc.average and self.config.wsc.bn_update == "recompute":
                with self.autocast():
                    batches = self.training_batches(self.training_indices(task), task.index, "batch norm")
                    recompute_batch_norm(self.network, (images for images, _ in batches))
            self.consolidation = None
        super().end_task(task)

    def get_extra_state(self):
        return super().get_extra_state() | {"wsc": self.consolidation.state_dict() if self.consolidation else None}

    def set_extra_state(self, state):
        super().set_extra_state(state)
        if self.consolidation:
            self.consolidation.load_state_dict(state["wsc"])
