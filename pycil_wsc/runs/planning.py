"""What learners cost, in advance: the number of training images of each task; and whether they can be built."""

import dataclasses
import functools
import json

import numpy as np

from pycil_wsc.data.configured import check_divided_memory
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.errors import UserError, WrongPlan
from pycil_wsc.keys import declared
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.networks.backbone_options import BackboneOptions
from pycil_wsc.networks.nets import check_features
from pycil_wsc.seeding import derived_seed, restored
from pycil_wsc.state import State
from pycil_wsc.training.learner import BaseLearner, configured_backbone, configured_memory, num_logits
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.learner_state import memory_of


def planned_images(config: LearnerConfig, manager: TaskSequence) -> int:
    """The number of training images of a whole run: the final value of ``images_trained``."""
    return sum(plan_of(config, manager))


def plan_of(config: LearnerConfig, manager: TaskSequence, start: State | None = None) -> list[int]:
    """The number of training images of each task.

    ``start``: as in :class:`pycil_wsc.runs.run.Run`; images of earlier tasks count as planned. Raises a
    :class:`UserError` if the method cannot learn a task.
    """
    return _plan_and_memory(config, manager, start)[0]


def planned_memory(config: LearnerConfig, manager: TaskSequence) -> int:
    """The number of exemplars after the last task."""
    return len(_plan_and_memory(config, manager)[1])


def _plan_and_memory(
    config: LearnerConfig, manager: TaskSequence, start: State | None = None
) -> tuple[list[int], ExemplarMemory]:
    """:func:`plan_of`, and the memory after the last task, with as many exemplars as there will be."""
    method = configured_learner(config).Plan(config)
    plan: list[int] = []
    memory = configured_memory(config, method).counting()  # there is no network yet
    if start:
        memory.load_state_dict(memory_of(start["learner"]))
        plan += np.diff([0, *(line["images_trained"] for line in start["history"])]).tolist()
    for task in manager.tasks[len(plan) :]:
        if method.needs_new_classes and not task.num_new:
            raise UserError(
                f"model_name: '{config.model_name}' cannot learn task {task.index + 1}, which brings no new class; "
                "use another method, such as 'replay' or 'wsc'"
            )
        if isinstance(memory, StreamMemory):
            memory.limit(num_logits(config, task, manager), len(manager.tasks))
        rng = np.random.default_rng(derived_seed(config.seed, "exemplars", task.index))  # as in BaseLearner.learn
        update = functools.partial(memory.update, task, manager.train_targets, None, rng, map)
        quotas = method.quotas(task, manager)
        if method.chooses_first:
            update(quotas)
        number, place = (task.num_seen, "of") if method.chooses_first else (task.num_old, "before")
        if method.needs_exemplars and len(memory) < number and not config.by_step:  # which is empty at first
            raise UserError(
                f"model_name: '{config.model_name}' needs exemplars, but the memory cannot hold one of each of the "
                f"{number} classes {place} task {task.index + 1}; give a larger memory"
            )
        if method.uses_memory and config.memory_size and quotas is None:
            which = f"the {task.num_old} classes before task {task.index + 1}"
            remedy = "give a larger number, or 0 to keep none"
            check_divided_memory(config, task.num_old, which, remedy, memory.capacity(task.num_old))
        divided = config.memory_size and not config.fixed_memory
        if quotas is not None and divided and task.num_old and not len(memory):
            raise UserError(
                f"memory_size: fewer than one exemplar of each of the {task.num_old} classes before task "
                f"{task.index + 1}; give a larger number, or 0 to keep none"
            )
        plan.append(method.planned_images(task, memory, manager.train_targets))
        if not method.chooses_first:
            update(quotas)
    return plan, memory


def check_backbone(config: LearnerConfig, image_size: int) -> None:
    """Raise a :class:`UserError` if the run's backbone cannot be built or used, by the method or at all.

    It is built once for all runs of a process that share it, without downloading weights.
    """
    values = {name: getattr(config, name) for name in ("convnet_options", *declared(BackboneOptions))}
    values["options"] = dataclasses.asdict(config.options)
    learner = configured_learner(config)
    wanted = learner, image_size, json.dumps(values, sort_keys=True)
    if wanted not in _buildable:
        with restored([]):
            weights = config.pretrained if isinstance(config.pretrained, str) else False
            backbone = configured_backbone(config, image_size, weights)
            learner.Plan(config).check_backbone(backbone)
            check_features(backbone, image_size, config.convnet_type)
        _buildable.add(wanted)


def check_plan(plan: list[int], learner: BaseLearner, task: Task) -> None:
    """Raise a :class:`WrongPlan` unless ``learner`` has trained on as many images as planned up to ``task``."""
    if learner.config.operations_like:
        return  # the plan is that of the epochs, and the budget decides
    plan = plan[: task.index + 1]
    if learner.spent.images != sum(plan):
        trained = learner.spent.images - sum(plan[:-1])
        raise WrongPlan(
            f"the learner '{learner.config.method}' trained on {trained:,} images in task {task.index + 1}, but"
            f" {plan[-1]:,} were planned; its Plan must list the epochs of every phase in epoch_keys"
            f" ({', '.join(learner.plan.epoch_keys)}), or override planned_images"
        )


def too_slow(learner: BaseLearner, plan: list[int], first: int = 0) -> list[str]:
    """One line if tasks have fewer optimiser steps than a key of the method needs to take effect.

    Args:
        learner: its plan has the :meth:`~pycil_wsc.training.plan.Plan.time_constants`.
        plan: the number of training images of each task.
        first: the first task that is still to be trained.
    """
    steps = []
    for task in learner.manager.tasks[first:]:
        epochs = max(1, learner.plan.planned_epochs(task))
        steps.append(epochs * learner.batches.number(plan[task.index] // epochs))
    if not steps:
        return []
    constants = learner.plan.time_constants(learner.network)
    slow = {name: needed for name, needed in constants.items() if needed > min(steps)}
    if not slow:
        return []
    needed = max(slow.values())
    fewer = sorted(number for number in steps if number < needed)
    about = f"{fewer[0]:,}" if fewer[0] == fewer[-1] else f"{fewer[0]:,} to {fewer[-1]:,}"
    tasks = "no task has as many" if len(fewer) == len(steps) else f"{len(fewer)} of {len(steps)} tasks have fewer"
    takes = "takes about" if len(slow) == 1 else "take up to about"
    return [
        f"{', '.join(slow)}: {takes} {needed:,.0f} optimiser steps to take effect, but {tasks} (about {about}); "
        "choose another value, or train for more epochs"
    ]


_buildable: set[tuple[type[BaseLearner], int, str]] = set()
