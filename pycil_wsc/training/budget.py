"""What a task may spend: as many operations as Replay would, or a number of seconds. Phases share it by their images.

A phase may spend what is left of the task's budget, times its share of the planned images that are left.
"""

from collections.abc import Iterator

import torch

from pycil_wsc.data.batches.features import FeatureSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.networks.layers import freeze
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.training.batch import Batch
from pycil_wsc.training.hooks import Hooks
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.step.backward import Backward, epoch_of
from pycil_wsc.training.step.cost import StepCost


def fit(learner: Hooks, task: Task, number: int, phase: Phase) -> None:
    """Set the length of a phase, and stretch its schedule to it. Has no effect on a phase that is fitted.

    A phase over stored features keeps its epochs: its operations are so few that they say nothing about its time.
    """
    config = learner.config
    spending = learner.spending
    stored = isinstance(phase.source, FeatureSource)
    if phase.fitted or not (config.operations_like or config.task_seconds):
        return
    phase.fitted = True
    if task.index != spending.task:
        spending.task = task.index
        spending.begun = []
        spending.seconds = 0.0
    if number == len(spending.begun):
        before = spending.begun[-1]["images"] + spending.begun[-1]["own"] if spending.begun else 0
        own = phase.epochs * phase.counted_images
        now = {"operations": learner.train_flops, "seconds": spending.seconds, "images": before, "own": own}
        spending.begun.append(now)
    if stored:
        return
    if config.operations_like:
        _fit_operations(learner, task, number, phase)
    else:
        _fit_seconds(learner, task, number, phase)


def _fit_operations(learner: Hooks, task: Task, number: int, phase: Phase) -> None:
    begun = learner.spending.begun
    spent = begun[number]["operations"] - begun[0]["operations"]
    left = (replay_operations(learner, task) - spent) * _share(learner, task, number)
    exemplars = learner.exemplars_per_epoch(task, phase)
    per_image, per_exemplar = costs_of_step(learner, task, number, phase, bool(exemplars))
    learner.step_cost, learner.exemplar_cost = round(per_image), round(per_exemplar)
    epochs = max(0, left) / (per_image * len(phase.indices) + per_exemplar * exemplars)
    batches = learner.num_batches(len(phase.indices), phase.batch_size)
    steps = max(1, round(epochs * batches))
    planned, schedule = phase.epochs * batches, phase.lr
    phase.steps, phase.epochs = steps, -(-steps // batches)
    if steps != planned:
        phase.lr = lambda epoch: schedule(epoch * planned / steps)


def _fit_seconds(learner: Hooks, task: Task, number: int, phase: Phase) -> None:
    assert learner.config.task_seconds is not None
    left = learner.config.task_seconds - learner.spending.begun[number]["seconds"]
    phase.seconds = max(left * _share(learner, task, number), 1e-9)  # at least one step


def _share(learner: Hooks, task: Task, number: int) -> float:
    """The phase's share of the planned images of the phases that are left."""
    of_task = learner.planned_images(learner.config, task, learner.memory.counting(), learner.manager.train_targets)
    begun = learner.spending.begun[number]
    own = begun["own"]
    return min(1.0, own / max(own, of_task - begun["images"], 1))


def replay_operations(learner: Hooks, task: Task) -> float:
    """The operations of Replay in the planned epochs of ``task``, with the memory before it."""
    images = len(task.train_indices) + len(learner.memory.before(task))
    with learner.seeded("cost"):
        network = IncrementalNet(learner.new_backbone(pretrained=False))
        network.grow(task.num_seen)
    freeze(network)
    network.to(learner.device).train()
    side, cost = learner.train_source.info.image_size, StepCost()
    with cost.measured(2), learner.autocast():
        network(torch.zeros(2, 3, side, side, device=learner.device)).float().sum().backward()
    assert cost.per_image is not None
    return learner.planned_epochs(learner.config, task) * images * cost.per_image


def costs_of_step(learner: Hooks, task: Task, number: int, phase: Phase, replays: bool = False) -> tuple[float, float]:
    """The operations of a phase per image and, before the step, per exemplar, counted in a step that is not taken:
    statistics and weights stay.

    ``replays``: whether the phase's batches have exemplars. The first batch that has one is then the step's.
    """
    cost, backward = StepCost(), Backward(learner, phase)
    kept = [(buffer, buffer.clone()) for buffer in learner.buffers()]
    learner.eval()
    phase.network.train()
    with learner.seeded("cost", device=learner.device):
        part = _first_batch(epoch_of(learner, task, number, phase, 0), replays)
        with cost.measured_before(part.replayed):
            batch = learner.before_step(part)
        with cost.measured(len(batch)):
            backward(batch)
            learner.after_backward(batch, backward)
    backward.clear()
    learner.zero_grad(set_to_none=True)
    for buffer, value in kept:
        buffer.copy_(value)
    assert cost.per_image is not None
    replayed = batch.replayed or 0
    before = (cost.per_exemplar or 0) * replayed
    sums = torch.tensor([cost.per_image * len(batch), len(batch), before, replayed], dtype=torch.float64)
    total, images, before, replayed = learner.processes.sum_(sums).tolist()
    return total / max(1.0, images), before / max(1.0, replayed)


def _first_batch(batches: Iterator[Batch], replays: bool) -> Batch:
    """The first of the batches or, if they replay, the first that has exemplars; the last if this process has none."""
    batch = next(batches)
    while replays and not batch.replayed:
        following = next(batches, None)
        if following is None:
            break
        batch = following
    return batch
