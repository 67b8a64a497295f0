"""The length of a phase: its epochs or, with a budget, as many steps as Replay's operations allow.

The phases of a task share its budget by their images: one may spend what is left, times its share of the planned images
that are left.
"""

import itertools
from dataclasses import replace

import torch

from pycil_wsc import seeding
from pycil_wsc.data.batches.feature_source import FeatureSource
from pycil_wsc.data.batches.gaussians import GaussianSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.networks.layers import freeze
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase, PhaseRun
from pycil_wsc.training.step.backward import Backward
from pycil_wsc.training.step.cost import StepCost
from pycil_wsc.training.trainable import Trainable


def planned(learner: Trainable, task: Task, number: int, phase: Phase) -> PhaseRun:
    """How the loop runs the task's phase ``number``. A budget sets its length, and stretches its schedule to it.

    A phase over features keeps its epochs: its operations are so few that they say nothing about its time.
    """
    config = learner.config
    run = PhaseRun(phase, number, config.batch_size, by_step=config.schedule_unit == "iteration")
    if not config.operations_like:
        return run
    _begin(learner, task, number, phase)
    if not isinstance(phase.source, FeatureSource | GaussianSource):
        _fit(learner, task, run)
    return run


def _begin(learner: Trainable, task: Task, number: int, phase: Phase) -> None:
    """Note what was spent before a phase, unless a resumed run has noted it."""
    spent = learner.spent
    if number == len(spent.begun):
        before = spent.begun[-1]["images"] + spent.begun[-1]["own"] if spent.begun else 0
        exemplars = len(learner.memory.before(task))
        images = phase.epochs * phase.counted_images
        if phase.stream:  # whose memory changes in the phase; it trains the task alone
            exemplars = len(learner.memory)
            images = _of_task(learner, task)
        spent.begun.append({"operations": spent.operations, "images": before, "own": images, "exemplars": exemplars})


def _fit(learner: Trainable, task: Task, run: PhaseRun) -> None:
    spent = learner.spent
    begun = spent.begun[run.number]
    left = replay_operations(learner, task, begun["exemplars"]) - (begun["operations"] - spent.before)
    if not run.phase.stream:
        left *= _share(learner, task, run.number)
    images = run.phase.times * len(run.phase.indices)
    exemplars = learner.batches.exemplars_in_epoch(run.phase, task.index)
    if run.phase.stream:  # on average over the epochs, as the memory fills
        exemplars = begun["own"] / run.phase.epochs - images
        images += exemplars
    if "per_image" not in begun:  # else a run resumes within the phase, whose step has been counted
        begun["per_image"], begun["per_exemplar"] = costs_of_step(learner, task, run)
        spent.per_image = round(begun["per_image"])
        spent.per_exemplar = round(begun["per_exemplar"])
    epochs = max(0, left) / (begun["per_image"] * images + begun["per_exemplar"] * exemplars)
    usual = run.steps
    steps = max(1, round(epochs * run.batches))
    schedule = run.lr
    run.end_after(steps)
    if steps != usual:
        run.lr = lambda epoch: schedule(epoch * usual / steps)


def _share(learner: Trainable, task: Task, number: int) -> float:
    """The phase's share of the planned images of the phases that are left."""
    begun = learner.spent.begun[number]
    images = begun["own"]
    return min(1.0, images / max(images, _of_task(learner, task) - begun["images"], 1))


def _of_task(learner: Trainable, task: Task) -> int:
    """The planned images of a task."""
    return learner.plan.planned_images(task, learner.memory.counting(), learner.manager.train_targets)


def replay_operations(learner: Trainable, task: Task, exemplars: float) -> float:
    """The operations of Replay in the planned epochs of ``task``, with so many exemplars of the tasks before.

    What the configuration freezes is frozen there, too, but for a method that tunes a frozen transformer from outside:
    Replay trains that.
    """
    images = len(task.train_indices) + exemplars
    with seeding.seeded(learner.config.seed, "cost"):
        network = IncrementalNet(learner.new_backbone(pretrained=False))
        network.grow(task.num_seen)
    if not learner.plan.tunes:
        freeze(network)
    network.to(learner.device).train()
    side = learner.batches.source.info.image_size
    cost = StepCost()
    with cost.measured(2), learner.precision.autocast():
        network(torch.zeros(2, 3, side, side, device=learner.device)).float().sum().backward()
    assert cost.per_image is not None
    return learner.plan.planned_epochs(task) * images * cost.per_image


def _with_stored(learner: Trainable, phase: Phase, batch: Batch) -> Batch:
    """The batch, whose replayed ones have zeros in place of what only the steps to come store."""
    if not batch.replay or any(part.stored for part in batch.replay):
        return batch
    alone = learner.before_step(replace(batch, replay=()))
    with torch.no_grad():
        _, logits = phase.loss(alone)
        values = learner.to_store(alone, logits)
    replay = []
    for part in batch.replay:
        stored = {name: value.new_zeros(len(part), *value.shape[1:]) for name, value in values.items()}
        replay.append(replace(part, stored=stored))
    return replace(batch, replay=tuple(replay))


def costs_of_step(learner: Trainable, task: Task, run: PhaseRun) -> tuple[float, float]:
    """The operations of a phase per image and, before the step, per exemplar, counted in a step that is not taken:
    statistics and weights stay. The step is that of the first batch with exemplars, if there is any.
    """
    phase = run.phase
    cost = StepCost()
    backward = Backward(learner, phase)
    kept = [(buffer, buffer.clone()) for buffer in learner.buffers()]
    learner.eval()
    phase.network.train()
    with seeding.seeded(learner.config.seed, "cost", device=learner.device):
        address = task.index, run.number, 0
        replayed = learner.batches.first_replayed(phase, *address)
        drawn = next(itertools.islice(learner.batches.of(phase, *address), replayed, None))
        drawn = _with_stored(learner, phase, drawn)
        with cost.measured_before(drawn.exemplars):
            batch = learner.before_step(drawn)
        with cost.measured(batch):
            backward(batch)
            learner.after_backward(batch, backward)
    backward.clear()
    learner.zero_grad(set_to_none=True)
    for buffer, value in kept:
        buffer.copy_(value)
    assert cost.per_image is not None
    exemplars = batch.exemplars
    before = (cost.per_exemplar or 0) * exemplars
    sums = torch.tensor([cost.per_image * batch.weight, batch.weight, before, exemplars], dtype=torch.float64)
    total, images, before, exemplars = learner.processes.sum_(sums).tolist()
    return total / max(1.0, images), before / max(1.0, exemplars)
