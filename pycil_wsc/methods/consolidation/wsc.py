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
from pycil_wsc.consolidation import Reset, WeightSpaceConsolidation
from pycil_wsc.consolidation.epochs import warmup_in_steps
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.methods.consolidation.scores import chosen_importance, cost_of_scoring
from pycil_wsc.methods.consolidation.triggers import Plateau, held_out_counts, held_out_exemplars, mean_loss
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import inner_units
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.studies.rival_resets import Fresh, Sum, Training
from pycil_wsc.training.learner import Arguments, BaseLearner, grow_for
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


@functools.cache
def consolidated(learner: type[BaseLearner]) -> type[BaseLearner]:
    """The class ``learner`` with consolidation on top."""
    return type(f"Consolidated{learner.__name__}", (Consolidated, learner), {})


class Consolidated(BaseLearner):
    """A mixin, placed before a learner: each later task trains with a :class:`WeightSpaceConsolidation`, configured by
    the keys ``wsc.*``.
    """

    class Plan(BaseLearner.Plan):
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

    consolidation: "ConsolidatedPhase | None" = None  # of the current task
    scoring: dict[str, float]

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.scoring = {"importance_seconds": 0.0, "importance_bytes": 0, "importance_passes": 0.0}
        self.warmups: list[int | None] = []  # epochs before the reset, per task
        self.replaced: list[int] = []  # units replaced, per task
        self.stopped: State = {}  # that of the consolidation with which a stopped run resumes

    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        reset_rule(self.config, self.network, 1, dict)  # one that does not fit fails before the first task is trained

    def phases(self, task: Task) -> Iterator[Phase]:
        self.batches.held_out = None  # forget those of an earlier task
        for number, phase in enumerate(super().phases(task)):
            if number:
                raise UserError(
                    f"model_name: '{self.config.model_name}' trains a task in several phases, so it cannot be "
                    "consolidated; declare one_phase = False in its Plan"
                )
            yield self._without_held_out(phase, task) if self._consolidates(task) else phase

    def _consolidates(self, task: Task) -> bool:
        return task.index > 0 or self.config.wsc.first_task

    def _without_held_out(self, phase: Phase, task: Task) -> Phase:
        """The phase without the exemplars on which a trigger measures the loss."""
        if self.config.wsc.trigger != "held_out":
            return phase
        self.batches.held_out = held_out_exemplars(self, task)
        kept = phase.indices[~np.isin(phase.indices, self.batches.held_out)]
        return replace(phase, indices=np.sort(kept))

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        super().begin_phase(task, run)
        if self._consolidates(task):
            self.consolidation = ConsolidatedPhase(self, task, run)
            if run.first:
                self.consolidation.load_state_dict(self.stopped)
                self.stopped = {}

    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None:
        super().after_epoch(task, run, epoch, loss)
        if self.consolidation:
            self.consolidation.after_epoch(epoch, loss)

    def end_task(self, task: Task) -> None:
        if self.consolidation:
            self.consolidation.end()
            self.warmups = [*self.warmups, self.consolidation.epochs_before_reset]
            if self.consolidation.replacement:
                self.replaced = [*self.replaced, self.consolidation.replacement.replaced]
            self.consolidation = self.batches.held_out = None
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
        phase = self.consolidation.state_dict() if self.consolidation else {}
        totals = {"warmups": self.warmups, "replaced": self.replaced, "scoring": dict(self.scoring)}
        return super().get_extra_state() | {"wsc": phase | totals}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        saved = state["wsc"]
        self.scoring = dict(saved["scoring"])
        self.warmups = list(saved["warmups"])
        self.replaced = list(saved["replaced"])
        self.stopped = saved
        self.spent.costs |= self._costs()


class ConsolidatedPhase:
    """A phase with :class:`WeightSpaceConsolidation` on top, from its beginning to the end of its task.

    It ends the warm-up, and holds the learning rate afterwards, if ``wsc.average_lr`` is set.

    Args:
        learner: whose network the phase trains.
        task: that of the phase.
        run: the phase, whose learning rates are changed.

    Attributes:
        replacement: a rule that replaces units throughout the task, instead of a reset; None: there is none.
        warm_epochs: the epochs before the reset; infinite until a plateau is reached.
    """

    def __init__(self, learner: Consolidated, task: Task, run: PhaseRun) -> None:
        self.learner = learner
        self.task = task
        self.run = run
        options = learner.config.wsc
        sum_ = learner.processes.sum_ if learner.processes.count > 1 else None
        rule = reset_rule(learner.config, learner.network, run.batches, self._fresh, sum_)
        self.wsc = self._built(rule).attach(run.phase.optimizer)
        self.replacement: Replacement | None = None
        if not (rule is None or isinstance(rule, Reset)):
            self.replacement = rule.attach(run.phase.optimizer)  # after the consolidation, which so sees a step first
        self.plateau: Plateau | None = None
        if self.wsc.warmup_steps is None:
            self.plateau = Plateau(options.patience, options.min_delta)
            self.warm_epochs = math.inf
        else:
            self.warm_epochs = options.held_from(run.epochs, self.wsc.warmup_steps)
        if options.holds_rate:
            self._hold_rate()

    def _built(self, rule: Reset | Replacement | None) -> WeightSpaceConsolidation:
        """The consolidation as configured, in the steps of the phase."""
        options, run = self.learner.config.wsc, self.run
        reset = rule if isinstance(rule, Reset) else None
        warmup = None  # until a plateau
        if options.trigger == "warmup":
            warmup = warmup_in_steps(options.warmup, run.epochs, run.batches, bool(rule))
            if warmup >= run.steps:  # a budget ends the last epoch early, which may be the only one
                warmup = warmup_in_steps(options.warmup, run.steps, resets=bool(rule))
        importance = chosen_importance(self.learner, self.task)
        given = {"importance": importance, "reset": reset, "warmup_steps": warmup}
        wsc = options.build(self.learner.network.named_parameters(), run.epochs, run.batches, **given)
        wsc.check_fits(run.steps)
        wsc.measure = functools.partial(cost_of_scoring, self.learner)
        costs = self.learner.scoring
        costs["importance_bytes"] = max(costs["importance_bytes"], wsc.tracked_bytes)
        return wsc

    def _hold_rate(self) -> None:
        """Hold the learning rate after the warm-up, which a plateau may end at any epoch."""
        config = self.learner.config
        interval = 1 if config.schedule_unit == "epoch" else 1 / self.run.batches
        schedule = self.run.lr
        held = config.wsc.average_lr, config.wsc.average_anneal, interval
        self.run.lr = lambda epoch: held_lr(schedule, self.warm_epochs, *held)(epoch)

    def _fresh(self) -> dict[str, Tensor]:
        """New initial values of the network's parameters: {name: tensor} of the same learner with another seed."""
        learner = self.learner
        before = [self.replacement.replaced] if self.replacement else []  # other values at each replacement
        seed = seeding.derived_seed(learner.config.seed, "reset", self.task.index, self.wsc.resets, *before)
        config = replace(learner.config, seed=seed, pretrained=False)
        other = type(learner)(config, learner.manager, learner.batches.source, learner.device, SINGLE_PROCESS)
        for earlier in learner.manager.tasks[: self.task.index + 1]:
            grow_for(other, earlier)
        return dict(other.network.named_parameters())

    def after_epoch(self, epoch: int, loss: float) -> None:
        """End the warm-up after the epoch, if the loss that is watched has reached a plateau."""
        if self.plateau and self.warm_epochs == math.inf and epoch + 1 < self.run.epochs:
            held_out = self.learner.batches.held_out
            watched = loss if held_out is None else mean_loss(self.learner, held_out)
            if self.plateau.reached(watched):
                self.wsc.end_warmup()
                self.warm_epochs = epoch + 1

    def end(self) -> None:
        """End the phase: the average becomes the weights, and batch norm's statistics are those of the average."""
        ended = self.epochs_before_reset is not None
        if ended:
            self.wsc.finish()
        self.detach()
        if ended and self.learner.config.wsc.average:
            self.learner.outputs.recompute_batch_norm(self.task)

    def detach(self) -> None:
        """Leave the optimiser alone."""
        self.wsc.detach()
        if self.replacement:
            self.replacement.detach()

    @property
    def epochs_before_reset(self) -> int | None:
        """None: no plateau was reached."""
        return int(self.warm_epochs) if self.warm_epochs < math.inf else None

    def _parts(self) -> dict[str, WeightSpaceConsolidation | Replacement | Plateau]:
        parts = {"consolidation": self.wsc, "replacement": self.replacement, "plateau": self.plateau}
        return {name: part for name, part in parts.items() if part}

    def state_dict(self) -> State:
        return {"warm_epochs": self.warm_epochs} | {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: State) -> None:
        """Raise :class:`UnusableRun` if the state is of another phase."""
        self.warm_epochs = state["warm_epochs"]
        try:
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
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
