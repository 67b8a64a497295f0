"""Weight Space Consolidation on top of a learner that trains one network in one phase per task, and the method ``wsc``:
Replay with it.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from pycil_wsc import registry, seeding
from pycil_wsc.consolidation import Reset
from pycil_wsc.consolidation.epochs import warmup_in_steps
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.methods.consolidation.scores import Scoring, chosen_importance, cost_of_scoring
from pycil_wsc.methods.consolidation.triggers import Plateau, held_out_counts, held_out_exemplars, mean_loss
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import Backbone, inner_units
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.studies.resets import Fresh, Sum, Training
from pycil_wsc.training.learner import Arguments, BaseLearner, Given, grow_for
from pycil_wsc.training.learner_config import Costs, LearnerConfig
from pycil_wsc.training.optimizers.schedules import held_lr
from pycil_wsc.training.phase import Phase, PhaseRun
from pycil_wsc.training.processes import SINGLE_PROCESS


class Replacement(Protocol):
    """A rule that replaces units throughout a task, instead of a reset after the warm-up."""

    replaced: int

    def attach(self, optimizer: Optimizer) -> "Replacement": ...

    def detach(self) -> None: ...

    def time_constants(self) -> dict[str, float]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


def configured_learner(config: LearnerConfig) -> type[BaseLearner]:
    """The learner's class of the run with this ``config``."""
    learner = registry.learners[config.model_name]
    return consolidated(learner) if config.consolidate else learner


def new_learner(config: LearnerConfig, *arguments: Unpack[Given], lent: Backbone | None = None) -> BaseLearner:
    """A new learner of the run with this ``config``; ``arguments``: the others of its constructor.

    ``lent``: the backbone of another learner, which a method that leaves it as it is may use
    (:class:`~pycil_wsc.methods.closed_form.closed_form.ClosedForm`).
    """
    learner = configured_learner(config)
    if lent is None:
        return learner(config, *arguments)
    assert issubclass(learner, ClosedForm)
    return learner(config, *arguments, lent=lent)


@functools.cache
def consolidated(learner: type[BaseLearner]) -> type[BaseLearner]:
    """The class ``learner`` with consolidation on top."""
    return type(f"Consolidated{learner.__name__}", (Consolidated, learner), {})


class Consolidated(Scoring):
    """A mixin, placed before a learner: each later task trains with a :class:`WeightSpaceConsolidation`, configured by
    the keys ``wsc.*``.
    """

    class Plan(Scoring.Plan):
        consolidates = True

        @property
        def plain_first_task(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
            """Not if it is consolidated: learners that are not could not share it."""
            return super().plain_first_task and not self.config.wsc.first_task

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            images = super().planned_images(task, memory, targets)
            if self.config.wsc.trigger != "held_out" or not (task.index or self.config.wsc.first_task):
                return images
            return images - self.planned_epochs(task) * sum(held_out_counts(self.config, memory, task).values())

        def time_constants(self, network: nn.Module) -> dict[str, float]:
            rule = reset_rule(self.config, network, 1, fresh=dict)
            of_rule = getattr(rule, "time_constants", dict)()
            return super().time_constants(network) | {f"wsc.{name}": steps for name, steps in of_rule.items()}

    replacement: Replacement | None = None  # this and the following: of the current task
    plateau: Plateau | None = None
    warm_epochs = math.inf  # infinite until a plateau is reached

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.scoring = {"importance_seconds": 0.0, "importance_bytes": 0, "importance_passes": 0.0}
        self.warmups: list[int | None] = []  # epochs before the reset, per task
        self.replaced: list[int] = []  # units replaced, per task

    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        self._rule(task, per_epoch=1)  # a rule that does not fit fails before the first task is trained, not after it

    def phases(self, task: Task) -> Iterator[Phase]:
        self.batches.held_out = None  # forget those of an earlier task
        for number, phase in enumerate(super().phases(task)):
            if number:
                raise UserError(
                    f"model_name: '{self.config.model_name}' trains a task in several phases, so it cannot be "
                    "consolidated; declare one_phase = False in its Plan"
                )
            if self._consolidates(task) and self.config.wsc.trigger == "held_out":
                held_out = held_out_exemplars(self, task)
                self.batches.held_out = held_out
                kept = phase.indices[~np.isin(phase.indices, held_out)]
                phase = replace(phase, indices=np.sort(kept))
            yield phase

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        super().begin_phase(task, run)
        if self._consolidates(task):
            self._consolidate(task, run)

    def _consolidates(self, task: Task) -> bool:
        return task.index > 0 or self.config.wsc.first_task

    # ---- the beginning of a task -------------------------------------------------------------------------------------

    def _consolidate(self, task: Task, run: PhaseRun) -> None:
        options = self.config.wsc
        rule = self._rule(task, run.batches)
        given = {"importance": chosen_importance(self, task), "reset": rule if isinstance(rule, Reset) else None}
        if options.trigger != "warmup":
            given["warmup_steps"] = None  # until a plateau
        else:
            warmup = warmup_in_steps(options.warmup, run.epochs, run.batches, bool(rule))
            if warmup >= run.steps:  # a budget ends the last epoch early, which may be the only one
                warmup = warmup_in_steps(options.warmup, run.steps, resets=bool(rule))
            given["warmup_steps"] = warmup
        wsc = options.build(self.network.named_parameters(), run.epochs, run.batches, **given)
        wsc.check_fits(run.steps)
        wsc.measure = functools.partial(cost_of_scoring, self)
        self.consolidation = wsc.attach(run.phase.optimizer)
        if not (rule is None or isinstance(rule, Reset)):
            self.replacement = rule.attach(run.phase.optimizer)  # after the consolidation, which so sees a step first
        if wsc.warmup_steps is None:
            self.warm_epochs = math.inf
            self.plateau = Plateau(options.patience, options.min_delta)
        else:
            self.warm_epochs = options.held_from(run.epochs, wsc.warmup_steps)
        if options.holds_rate:
            interval = 1 if self.config.schedule_unit == "epoch" else 1 / run.batches
            schedule = run.lr
            held = options.average_lr, options.average_anneal, interval
            run.lr = lambda epoch: held_lr(schedule, self.warm_epochs, *held)(epoch)

    def _rule(self, task, per_epoch) -> Reset | Replacement | None:
        sum_ = self.processes.sum_ if self.processes.count > 1 else None
        return reset_rule(self.config, self.network, per_epoch, functools.partial(self._fresh, task), sum_)

    def _fresh(self, task) -> dict[str, Tensor]:
        """New initial values of the network's parameters: {name: tensor} of the same learner with another seed."""
        assert self.consolidation is not None
        before = [self.replacement.replaced] if self.replacement else []  # other values at each replacement
        seed = seeding.derived_seed(self.config.seed, "reset", task.index, self.consolidation.resets, *before)
        config = replace(self.config, seed=seed, pretrained=False)
        other = type(self)(config, self.manager, self.batches.source, self.device, SINGLE_PROCESS)
        for earlier in self.manager.tasks[: task.index + 1]:
            grow_for(other, earlier)
        return dict(other.network.named_parameters())

    # ---- during and after a task -------------------------------------------------------------------------------------

    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None:
        super().after_epoch(task, run, epoch, loss)
        if self.consolidation and self.plateau and self.warm_epochs == math.inf and epoch + 1 < run.epochs:
            if self.plateau.reached(self._watched(loss)):
                self.consolidation.end_warmup()
                self.warm_epochs = epoch + 1

    def _watched(self, loss: float) -> float:
        """The loss whose plateau ends the warm-up: that of training, or of the exemplars that are held out."""
        held_out = self.batches.held_out
        return loss if held_out is None else mean_loss(self, held_out)

    def end_task(self, task: Task) -> None:
        if self.consolidation:
            ended = self.warm_epochs < math.inf
            self.warmups = [*self.warmups, int(self.warm_epochs) if ended else None]
            if ended:
                self.consolidation.finish()
            self.consolidation.detach()
            if self.replacement:
                self.replacement.detach()
                self.replaced = [*self.replaced, self.replacement.replaced]
            if ended and self.config.wsc.average:
                self.outputs.recompute_batch_norm(task)
            self.consolidation = self.replacement = self.plateau = self.batches.held_out = None
        super().end_task(task)
        self.spent.costs |= self._costs()

    def _costs(self) -> Costs:
        """What the result says of the tasks so far, beside what all learners cost."""
        options = self.config.wsc
        costs: Costs = {}
        rival = registry.resets.get(options.reset)
        if options.reset != "none" and (rival is None or rival.ranks):
            costs |= self.scoring
        if options.trigger != "warmup":
            costs["warmup_epochs"] = self.warmups
        if self.replaced:
            costs["units_replaced"] = self.replaced
        return costs

    def get_extra_state(self) -> State:
        parts = {}
        for name in "consolidation", "replacement", "plateau":
            part = getattr(self, name)
            if part:
                parts[name] = part.state_dict()
        mine = {
            "warm_epochs": self.warm_epochs,
            "warmups": self.warmups,
            "replaced": self.replaced,
            "scoring": dict(self.scoring),
        }
        return super().get_extra_state() | {"wsc": parts | mine}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        mine = state["wsc"]
        self.warm_epochs = mine["warm_epochs"]
        self.scoring = dict(mine["scoring"])
        self.warmups = list(mine["warmups"])
        self.replaced = list(mine["replaced"])
        self.spent.costs |= self._costs()
        for name in "consolidation", "replacement", "plateau":
            if part := getattr(self, name):
                try:
                    part.load_state_dict(mine[name])
                except ValueError as error:
                    raise UnusableRun(f"the checkpoint cannot be used ({error})") from None


def reset_rule(
    config: LearnerConfig, network: nn.Module, per_epoch: int, fresh: Fresh, sum_: Sum | None = None
) -> Reset | Replacement | None:
    """The reset that ``wsc.reset`` names: one of the options' own, or a registered one.

    ``per_epoch``: the steps of an epoch; ``fresh`` and ``sum_``: as of :class:`Training`.
    """
    options = config.wsc
    if options.reset not in registry.resets:
        return options.reset_rule(per_epoch)
    every = options.steps_between_resets(per_epoch)
    training = Training(network, inner_units(network), fresh, every, options, sum_)
    try:
        return registry.resets[options.reset].build(training)
    except ValueError as error:
        problem = f"wsc.reset: '{options.reset}' {error}; use another backbone or reset"
        raise UnusableRun(problem) from None


@register_learner("wsc", epochs=70, milestones=[30, 50])
class WSC(consolidated(Replay)):
    """Replay with Weight Space Consolidation: "Ours" in Forget Forgetting."""
