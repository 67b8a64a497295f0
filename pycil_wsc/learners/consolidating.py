"""Weight Space Consolidation on top of a learner that trains one network in one phase per task."""

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc import seeding
from pycil_wsc.consolidation import (
    Blend,
    Reset,
    Revert,
    WeightSpaceConsolidation,
    recompute_batch_norm,
)
from pycil_wsc.consolidation.epochs import chosen_average, held_from, steps_between, warmup_in_steps
from pycil_wsc.data.memory import ExemplarMemory
from pycil_wsc.data.tasks import Task
from pycil_wsc.engine.phase import Phase
from pycil_wsc.engine.schedules import held_lr
from pycil_wsc.engine.synced_batch_norm import synced_batch_norm
from pycil_wsc.engine.triggers import Plateau, held_out_counts, held_out_exemplars, mean_loss
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.learners.scoring import chosen_importance
from pycil_wsc.networks.nets import inner_units
from pycil_wsc.studies.continual_backprop import ContinualBackprop
from pycil_wsc.studies.resets import Random, ShrinkPerturb

RANKED = ("blend", "revert", "random")  # the resets that rank elements by their scores


@functools.cache
def consolidated(learner: type[BaseLearner]) -> type[BaseLearner]:
    """The class ``learner`` with consolidation on top."""
    return type(f"Consolidated{learner.__name__}", (Consolidated, learner), {})


class Consolidated(BaseLearner):
    """A mixin, placed before a learner: each later task trains with a :class:`WeightSpaceConsolidation`, configured by
    the keys ``wsc.*``.
    """

    consolidates = True
    consolidation: WeightSpaceConsolidation | None = None  # this and the following: of the current task
    replacement: ContinualBackprop | None = None
    plateau: Plateau | None = None
    held_out_indices: np.ndarray | None = None  # exemplars that are not trained on
    warm_epochs = math.inf  # infinite until a plateau is reached

    @classmethod
    def planned_images(cls, config: Any, task: Task, memory: ExemplarMemory) -> int:
        images = super().planned_images(config, task, memory)
        if config.wsc.trigger != "held_out" or not (task.index or config.wsc.first_task):
            return images
        return images - cls.planned_epochs(config, task) * sum(held_out_counts(config, memory, task).values())

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.scoring = {"importance_seconds": 0.0, "importance_bytes": 0, "importance_passes": 0.0}
        self.warmups: list[int | None] = []  # epochs before the reset, per task
        self.replaced: list[int] = []  # units replaced, per task

    @property
    def plain_first_task(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().plain_first_task and not self.config.wsc.first_task

    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        if self.config.wsc.reset == "continual_backprop":
            self._units()  # fails before the first task is trained, not after it

    def training_indices(self, task: Task) -> np.ndarray:
        """The task's samples and all exemplars but those that are held out: (n,)."""
        indices = super().training_indices(task)
        return indices if self.held_out_indices is None else np.setdiff1d(indices, self.held_out_indices)

    def phases(self, task: Task) -> Iterator[Phase]:
        for number, phase in enumerate(super().phases(task)):
            if number:
                raise UserError(
                    f"model_name: '{self.config.model_name}' trains a task in several phases, so it cannot be "
                    "consolidated; declare one_phase = False in its class"
                )
            if task.index or self.config.wsc.first_task:
                self._consolidate(task, phase)
            yield phase

    # ---- the beginning of a task -------------------------------------------------------------------------------------

    def _consolidate(self, task, phase):
        options = self.config.wsc
        if options.trigger == "held_out":
            self.held_out_indices = held_out_exemplars(self, task)
            phase.indices = self.training_indices(task)
        per_epoch = self.num_batches(len(phase.indices))
        reset = self._reset_rule(task, per_epoch)
        self.consolidation = WeightSpaceConsolidation(
            self.network.named_parameters(),
            warmup_steps=self._warmup_steps(phase.epochs, per_epoch, reset),
            retain=options.retain,
            importance=chosen_importance(self, task),
            reset=reset,
            average=chosen_average(options, per_epoch),
            rank_scope=options.rank_scope,
            eligible=self._eligible(task),
            named_buffers=self.network.named_buffers(),
        ).attach(phase.optimizer)
        try:
            self.consolidation.check_fits(phase.epochs * per_epoch)
        except ValueError as error:
            raise UnusableRun(f"wsc: task {task.index + 1} is too short ({error}); change the keys 'wsc.*'") from None
        if options.reset == "continual_backprop":
            fresh, rates = functools.partial(self._fresh, task), (options.replacement_rate, options.maturity)
            sum_ = self.processes.sum_ if self.processes.count > 1 else None
            self.replacement = ContinualBackprop(
                self.network, self._units(), fresh, *rates, options.utility_decay, sum_
            )
            self.replacement.attach(phase.optimizer)
        if options.average and options.average_lr is not None:
            interval = 1 if self.config.schedule_unit == "epoch" else 1 / per_epoch
            schedule, held = phase.lr, (options.average_lr, options.average_anneal, interval)
            phase.lr = lambda epoch: held_lr(schedule, self.warm_epochs, *held)(epoch)

    def _reset_rule(self, task, per_epoch) -> Reset | None:
        options, fresh = self.config.wsc, functools.partial(self._fresh, task)
        common = {
            "every": steps_between(options.reset_every, per_epoch),
            "momentum": options.reset_momentum,
            "buffers": options.reset_buffers,
        }
        if options.reset == "blend":
            return Blend(options.blend, **common)
        if options.reset == "revert":
            return Revert(**common)
        if options.reset == "random":
            return Random(fresh, **common)
        if options.reset == "shrink_perturb":
            return ShrinkPerturb(fresh, options.shrink, options.perturb, **common)
        return None

    def _warmup_steps(self, epochs, per_epoch, reset):
        """Steps before the reset, or None if a plateau ends the warm-up; sets ``warm_epochs`` and ``plateau``."""
        options = self.config.wsc
        if options.trigger != "warmup":
            self.warm_epochs, self.plateau = math.inf, Plateau(options.patience)
            return None
        steps = warmup_in_steps(options.warmup, epochs, per_epoch, resets=reset is not None)
        self.warm_epochs = held_from(options.warmup, epochs, steps)
        return steps

    def _units(self):
        """The layers of units that are trained; see ``units`` of :class:`ContinualBackprop`.

        Layers that it does not support, such as those before a grouped convolution, are left out.
        """
        units = [
            names
            for names in inner_units(self.network)
            if ContinualBackprop.supports(self.network, *names)
            and self.network.get_submodule(names[0]).weight.requires_grad
        ]
        if not units:
            raise UnusableRun(
                f"wsc.reset: 'continual_backprop' finds no units in '{self.config.convnet_type}'; "
                "its blocks need conv1, bn1 and conv2, without groups; use another backbone or reset"
            )
        return units

    def _eligible(self, task):
        """{name: bool tensor} of the parameters that are excluded from ranking and reset, as a whole or in part."""
        options, masks, network = self.config.wsc, {}, self.network
        heads = {"head": task.num_old}  # and the number of its rows that are not new
        if getattr(network, "aux_head", None) is not None:
            heads["aux_head"] = 0
        for head, num_old in heads.items():
            for name, param in network.get_submodule(head).named_parameters(prefix=head):
                if not options.reset_head:
                    masks[name] = torch.zeros_like(param, dtype=torch.bool)
                elif not options.reset_new_rows:
                    old = torch.arange(len(param), device=param.device) < num_old
                    masks[name] = old.view(-1, *[1] * (param.dim() - 1)).expand_as(param)
        for prefix, module in network.named_modules():
            if isinstance(module, _BatchNorm) and not options.reset_norm:
                masks |= {
                    name: torch.zeros_like(param, dtype=torch.bool)
                    for name, param in module.named_parameters(prefix)
                    if param.requires_grad
                }
        return masks

    def _fresh(self, task) -> dict[str, Tensor]:
        """New initial values of the network's parameters: {name: tensor} of the same learner with another seed."""
        assert self.consolidation is not None
        before = [self.replacement.replaced] if self.replacement else []  # other values at each replacement
        seed = seeding.derived_seed(self.config.seed, "reset", task.index, self.consolidation.resets, *before)
        other = type(self)(
            replace(self.config, seed=seed, pretrained=False), self.manager, self.train_source, self.device
        )
        for each in self.manager.tasks[: task.index + 1]:
            other.grow_for(each)
        return dict(other.network.named_parameters())

    # ---- during and after a task -------------------------------------------------------------------------------------

    def after_epoch(self, task: Task, phase: Phase, epoch: int, loss: float) -> None:
        super().after_epoch(task, phase, epoch, loss)
        if self.plateau and self.consolidation and self.warm_epochs == math.inf and epoch + 1 < phase.epochs:
            if self.plateau.reached(loss if self.held_out_indices is None else mean_loss(self, self.held_out_indices)):
                self.consolidation.end_warmup()
                self.warm_epochs = epoch + 1

    def end_task(self, task: Task) -> None:
        if self.consolidation:
            ended = self.warm_epochs < math.inf
            self.warmups = [*self.warmups, int(self.warm_epochs) if ended else None]
            averaged = ended and self._finish(task)
            self.consolidation.detach()
            if self.replacement:
                self.replacement.detach()
                self.replaced = [*self.replaced, self.replacement.replaced]
            if averaged and self.config.wsc.bn_update == "recompute":
                address = ("dropout", task.index, "batch norm", self.processes.rank)
                with self.autocast(), synced_batch_norm(self.processes), self.seeded(*address, device=self.device):
                    batches = self.training_batches(self.training_indices(task), task.index, "batch norm")
                    recompute_batch_norm(self.network, (batch.images for batch in batches))
            self.consolidation = self.replacement = self.plateau = self.held_out_indices = None
        super().end_task(task)

    def _finish(self, task) -> bool:
        """Finish the consolidation; returns whether the weights are now an average."""
        options = self.config.wsc
        assert self.consolidation is not None
        # A plateau may come too late for the first sample; without a trigger, check_fits() has refused such a task.
        if options.average and not options.average_last and not self.consolidation.averaged:
            if self.processes.first:
                logging.getLogger("pycil_wsc").warning(
                    "wsc: the plateau of task %d, after epoch %d, came too late for a sample of the average; the last "
                    "weights are kept (wsc.average_last would include them)",
                    task.index + 1,
                    self.warm_epochs,
                )
            return False
        self.consolidation.finish()
        return options.average

    def costs(self) -> dict[str, Any]:
        options, costs = self.config.wsc, super().costs()
        costs |= self.scoring if options.reset in RANKED else {}
        costs |= {"warmup_epochs": self.warmups} if options.trigger != "warmup" else {}
        return costs | ({"units_replaced": self.replaced} if options.reset == "continual_backprop" else {})

    def get_extra_state(self) -> dict[str, Any]:
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

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        mine = state["wsc"]
        self.warm_epochs, self.scoring = mine["warm_epochs"], dict(mine["scoring"])
        self.warmups, self.replaced = list(mine["warmups"]), list(mine["replaced"])
        for name in "consolidation", "replacement", "plateau":
            if part := getattr(self, name):
                try:
                    part.load_state_dict(mine[name])
                except ValueError as error:
                    raise UnusableRun(f"the checkpoint cannot be used ({error})") from None
