"""The training loop of all learners: phases, epochs and steps, and when which hook is called."""

import contextlib

import torch

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.training import budget
from pycil_wsc.training.hooks import Hooks
from pycil_wsc.training.optimization import clip
from pycil_wsc.training.phase import Monitor, Phase, Resume
from pycil_wsc.training.step.backward import Backward, epoch_of
from pycil_wsc.training.step.cost import StepCost
from pycil_wsc.training.step.pace import Pace


def train(learner: Hooks, task: Task, monitor: Monitor, resume: Resume | None) -> None:
    """Train the phases of a task, from the position ``resume`` on."""
    for number, phase in enumerate(learner.phases(task)):
        if resume and number < resume.phase:
            learner.load_state_dict(resume.learner, strict=False)  # what the next phase is prepared from
            continue
        budget.fit(learner, task, number, phase)
        first = 0
        if resume and number == resume.phase:
            learner.load_state_dict(resume.learner)
            phase.optimizer.load_state_dict(resume.optimizer)
            first = resume.epoch
        fit(learner, task, number, phase, first, monitor)


def fit(learner: Hooks, task: Task, number: int, phase: Phase, first: int, monitor: Monitor) -> None:
    """Train the epochs of a phase, from epoch ``first``. Synchronises with the device at the end of an epoch only."""
    config, processes, device = learner.config, learner.processes, learner.device
    cost, pace = StepCost(), Pace(learner, phase, first)
    backward = Backward(learner, phase)
    if first:  # a step may cost more or less than that of the first epoch, which counts
        cost.per_image, cost.per_exemplar = learner.step_cost, learner.exemplar_cost
    monitor.phase_started(task, phase, first)
    learner.zero_grad(set_to_none=True)
    for epoch in pace.epochs():
        learner.eval()
        phase.network.train()
        backward.begin_epoch()
        total_loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device, dtype=torch.int64)
        with learner.seeded("dropout", task.index, number, epoch, processes.rank, device=device):
            for part in pace.steps(epoch, epoch_of(learner, task, number, phase, epoch)):
                with cost.measured_before(part.replayed):
                    batch = learner.before_step(part)
                with cost.measured(len(batch)) if cost.unknown else contextlib.nullcontext():
                    loss, right = backward(batch)
                    total_loss += loss
                    correct += right
                    learner.after_backward(batch, backward)
                clip(phase.optimizer, config.clip_norm)
                phase.optimizer.step()
                learner.after_step()
                backward.clear()
                monitor.step(len(batch))
        images = pace.images()
        learner.images_trained += round(phase.counted_images * images / len(phase.indices))
        replayed = int(processes.sum_(torch.tensor(pace.replayed, device=device)).item())
        learner.step_cost, learner.exemplar_cost = cost.per_image, cost.per_exemplar
        learner.train_flops += (cost.per_image or 0) * images + (cost.per_exemplar or 0) * replayed
        mean_loss = processes.sum_(total_loss).item() / pace.done
        accuracy = 100 * processes.sum_(correct).item() / images
        pace.end_epoch(epoch)
        learner.after_epoch(task, phase, epoch, mean_loss)
        monitor.epoch_ended(task, number, phase, epoch, mean_loss, accuracy)
