"""Weight Space Consolidation over a learner that trains one network in one phase per task."""

import copy
import functools
import math
import time
from dataclasses import replace

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc import registry, seeding
from pycil_wsc.consolidation import ContinualBackprop, WeightSpaceConsolidation, recompute_batch_norm
from pycil_wsc.data.loader import num_batches
from pycil_wsc.engine.schedules import held_lr
from pycil_wsc.engine.step_cost import PeakBytes
from pycil_wsc.engine.triggers import Plateau, held_out_exemplars, mean_loss
from pycil_wsc.errors import UserError
from pycil_wsc.networks.nets import inner_units

RANKED = ("blend", "revert", "random")  # the resets that keep some elements for their scores


@functools.cache
def consolidated(learner):
    """The class ``learner`` with consolidation on top."""
    return type(f"Consolidated{learner.__name__}", (Consolidated, learner), {})


class Consolidated:
    """Mixed in before a learner: its training phase is followed by a :class:`WeightSpaceConsolidation` with the keys ``wsc.*``."""

    consolidates = True
    consolidation = None  # of the task under way; so are the next four
    replacement = None  # of units, by continual backprop
    plateau = None
    held_out = None  # indices of exemplars
    warm_epochs = math.inf  # of the task under way; infinite until a plateau comes

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scoring = {
            "importance_seconds": 0.0,
            "importance_bytes": 0,
            "importance_passes": 0.0,
        }  # seconds: of the tasks that are done
        self.warmups, self.replaced = [], []  # for each task: epochs before the reset, units replaced

    @property
    def plain_first_task(self):
        return super().plain_first_task and not self.config.wsc.first_task

    def phases(self, task):
        for phase in super().phases(task):
            if task.index or self.config.wsc.first_task:
                self._consolidate(task, phase)
            yield phase

    def _consolidate(self, task, phase):
        options = self.config.wsc
        if options.trigger == "held_out":
            self.held_out = held_out_exemplars(self, task)
            phase.indices = np.setdiff1d(phase.indices, self.held_out)
        reset = "none" if options.reset == "continual_backprop" else options.reset
        per_epoch = num_batches(len(phase.indices), self.config.batch_size)
        epochs = int(options.warmup * phase.epochs)
        steps = epochs * per_epoch or int(options.warmup * phase.epochs * per_epoch)  # less than an epoch: in steps
        if options.trigger == "warmup":
            self.warm_epochs, steps = max(1, epochs), steps if reset == "none" else max(1, steps)
        else:
            self.warm_epochs, steps, self.plateau = math.inf, None, Plateau(options.patience)
        self.consolidation = WeightSpaceConsolidation(
            self.network.named_parameters(),
            warmup_steps=steps,
            average_every=options.average_every * (per_epoch if options.average_unit == "epoch" else 1),
            retain=options.retain,
            blend=options.blend,
            importance=functools.partial(self._score, task)
            if options.importance in registry.importances
            else options.importance,
            betas=options.betas,
            score_abs=options.score_abs,
            rank_scope=options.rank_scope,
            reset=reset,
            shrink=options.shrink,
            perturb=options.perturb,
            fresh=functools.partial(self._fresh, task),
            reset_every=steps_between(options.reset_every, per_epoch),
            reset_momentum=options.reset_momentum,
            average=options.average,
            average_start=options.average_start,
            average_count=options.average_count,
            average_last=options.average_last,
            named_buffers=self.network.named_buffers(),
            reset_buffers=options.reset_buffers,
            average_buffers=options.bn_update == "average",
            eligible=self._eligible(task),
        ).attach(phase.optimizer)
        if options.reset == "continual_backprop":
            fresh = functools.partial(self._fresh, task)
            self.replacement = ContinualBackprop(
                self.network, self._units(), fresh, options.replacement_rate, options.maturity, options.utility_decay
            )
            self.replacement.attach(phase.optimizer)
        self.scoring["importance_bytes"] = max(self.scoring["importance_bytes"], self.consolidation.scoring_bytes)
        if options.average and options.average_lr is not None:
            schedule = phase.lr
            phase.lr = lambda epoch: held_lr(schedule, self.warm_epochs, options.average_lr, options.average_anneal)(
                epoch
            )

    def after_epoch(self, task, phase, epoch, loss):
        super().after_epoch(task, phase, epoch, loss)
        if self.plateau and self.warm_epochs == math.inf and epoch + 1 < phase.epochs:
            if self.plateau.reached(loss if self.held_out is None else mean_loss(self, self.held_out)):
                self.consolidation.end_warmup()
                self.warm_epochs = epoch + 1

    def _units(self):
        """The units of the parts that learn."""
        units = [
            names for names in inner_units(self.network) if self.network.get_submodule(names[0]).weight.requires_grad
        ]
        if not units:
            raise UserError(
                f"wsc.reset: 'continual_backprop' finds no units in '{self.config.convnet_type}'; its blocks need conv1, bn1 and conv2"
            )
        return units

    def _eligible(self, task):
        """{name: bool tensor} of the parameters that do not take part whole in ranking and reset."""
        options, masks, network = self.config.wsc, {}, self.network
        for name, param in network.head.named_parameters(prefix="head"):
            if not options.reset_head:
                masks[name] = torch.zeros_like(param, dtype=torch.bool)
            elif not options.reset_new_rows:
                old = torch.arange(len(param), device=param.device) < task.num_old
                masks[name] = old.view(-1, *[1] * (param.dim() - 1)).expand_as(param)
        for prefix, module in network.named_modules():
            if isinstance(module, _BatchNorm) and not options.reset_norm:
                masks |= {
                    name: torch.zeros_like(param, dtype=torch.bool)
                    for name, param in module.named_parameters(prefix)
                    if param.requires_grad
                }
        return masks

    def _score(self, task, params, previous):
        """Scores of an importance that passes over the data again, in evaluation mode and fp32; what that takes is counted."""
        batches = UnaugmentedBatches(self, task)
        modes = {module: module.training for module in self.network.modules()}
        self.network.eval()
        importance = registry.importances[self.config.wsc.importance]

        def function(batches):
            return importance(self.network, params, previous, batches, self.config.wsc)

        if not self.scoring["importance_passes"]:
            self._measure_memory(function, batches)
        scores = function(batches)
        for module, mode in modes.items():
            module.training = mode
        self.scoring["importance_passes"] += batches.images / len(self.training_indices(task))
        return scores

    def _measure_memory(self, function, batches):
        """By one batch more than is scored by, as counting takes time; that is not the importance's."""
        start = time.perf_counter()
        with PeakBytes() as memory:
            function(batches.first())
        self.scoring["importance_bytes"] = memory.peak
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.scoring["importance_seconds"] -= time.perf_counter() - start

    def _fresh(self, task):
        """New initial values of the network's parameters, {name: tensor}: those that the learner has under another seed."""
        seed = seeding.derived_seed(self.config.seed, "reset", task.index, self.consolidation.resets)
        other = type(self)(replace(self.config, seed=seed), self.manager, self.train_source, self.device)
        for each in self.manager.tasks[: task.index + 1]:
            other.grow_for(each)
        return dict(other.network.named_parameters())

    def costs(self):
        options, costs = self.config.wsc, super().costs()
        costs |= self.scoring if options.reset in RANKED else {}
        costs |= {"warmup_epochs": self.warmups} if options.trigger != "warmup" else {}
        return costs | ({"units_replaced": self.replaced} if options.reset == "continual_backprop" else {})

    def end_task(self, task):
        if self.consolidation:
            ended = self.warm_epochs < math.inf
            self.warmups = [*self.warmups, self.warm_epochs if ended else None]
            self.scoring["importance_seconds"] += self.consolidation.scoring_seconds
            if ended:
                self.consolidation.finish()
            self.consolidation.detach()
            if self.replacement:
                self.replacement.detach()
                self.replaced = [*self.replaced, self.replacement.replaced]
            if ended and self.config.wsc.average and self.config.wsc.bn_update == "recompute":
                with self.autocast():
                    batches = self.training_batches(self.training_indices(task), task.index, "batch norm")
                    recompute_batch_norm(self.network, (images for images, _ in batches))
            self.consolidation = self.replacement = self.plateau = self.held_out = None
        super().end_task(task)

    def get_extra_state(self):
        parts = {
            name: part.state_dict()
            for name in ("consolidation", "replacement", "plateau")
            if (part := getattr(self, name))
        }
        mine = {
            "warm_epochs": self.warm_epochs,
            "warmups": self.warmups,
            "replaced": self.replaced,
            "scoring": dict(self.scoring),
        }
        return super().get_extra_state() | {"wsc": parts | mine}

    def set_extra_state(self, state):
        super().set_extra_state(state)
        mine = state["wsc"]
        self.warm_epochs, self.warmups, self.replaced, self.scoring = (
            mine[name] for name in ("warm_epochs", "warmups", "replaced", "scoring")
        )
        for name in "consolidation", "replacement", "plateau":
            if part := getattr(self, name):
                part.load_state_dict(mine[name])


class UnaugmentedBatches:
    """The task's training data with the memory, or as many samples of it as ``wsc.importance_samples`` says, to be gone through any number of times."""

    def __init__(self, learner, task):
        self.learner, self.images = learner, 0  # images passed over so far
        self.seed = seeding.derived_seed(learner.config.seed, "importance", task.index, learner.consolidation.resets)
        indices, wanted = learner.training_indices(task), learner.config.wsc.importance_samples
        self.indices = indices if wanted is None else np.random.default_rng(self.seed).permutation(indices)[:wanted]

    def __iter__(self):
        learner = self.learner
        for images, targets in learner.train_source.batches(
            self.indices, learner.manager.train_targets, learner.config.batch_size
        ):
            self.images += len(images)
            yield images, targets

    def first(self):
        """The same of one batch."""
        one = copy.copy(self)
        one.indices = self.indices[: self.learner.config.batch_size]
        return one


def steps_between(often, per_epoch):
    """Optimiser steps between resets, or None for a single one."""
    return {"once": None, "epoch": per_epoch, "iteration": 1}[often] if isinstance(often, str) else often * per_epoch
