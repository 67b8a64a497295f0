"""The training loop of all learners: phases, epochs and steps, and when which hook is called."""

import contextlib

import torch

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UnusableRun
from pycil_wsc.training import budget
from pycil_wsc.training.optimizers.parameter_groups import clip
from pycil_wsc.training.phase import Monitor, PhaseRun, Resume
from pycil_wsc.training.step.backward import Backward
from pycil_wsc.training.step.cost import StepCost
from pycil_wsc.training.trainable import Trainable


def train(learner: Trainable, task: Task, monitor: Monitor, resume: Resume | None) -> None:
    """Train the phases of a task, from the position ``resume`` on."""
    learner.spent.begin(task.index)
    for number, phase in enumerate(learner.phases(task)):
        if resume and number < resume.phase:
            learner.load_state_dict(resume.learner, strict=False)  # what the next phase is prepared from
            continue
        run = budget.planned(learner, task, number, phase)
        learner.begin_phase(task, run)
        first = 0
        if resume and number == resume.phase:
            learner.load_state_dict(resume.learner)
            phase.optimizer.load_state_dict(resume.optimizer)
            first = resume.epoch
            learner.restoring = False
        fit(learner, task, run, first, monitor)


def fit(learner: Trainable, task: Task, run: PhaseRun, first: int, monitor: Monitor) -> None:
    """Train the epochs of a phase, from epoch ``first``. Synchronises with the device at the end of an epoch only."""
    phase = run.phase
    processes = learner.processes
    device = learner.device
    spent = learner.spent
    cost = StepCost()
    backward = Backward(learner, phase)
    learner.over.weights.begin(learner.batches.class_weights(phase, task.index))
    if first:  # a step may cost more or less than that of the first epoch, which counts
        cost.per_image = spent.per_image
        cost.per_exemplar = spent.per_exemplar
        cost.replays = spent.replays
    monitor.phase_started(task, run, first)
    learner.zero_grad(set_to_none=True)
    for epoch in range(first, run.epochs):
        run.begin_epoch(epoch)
        learner.eval()
        phase.network.train()
        backward.begin_epoch()
        total_loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device, dtype=torch.int64)
        batches = learner.batches.of(phase, task.index, run.number, epoch)
        address = task.index, run.number, epoch, processes.rank
        with seeding.seeded(learner.config.seed, "dropout", *address, device=device):
            for drawn in run.within(epoch, batches):
                with cost.measured_before(drawn.exemplars):
                    batch = learner.before_step(drawn)
                with cost.measured(batch) if cost.lacks(batch) else contextlib.nullcontext():
                    loss, right = backward(batch)
                    if run.number == 0:
                        _check_weighted(learner)
                    total_loss += loss
                    correct += right
                    rows = learner.to_store(batch, backward.logits) if batch.entering else {}
                    learner.after_backward(batch, backward)
                clip(phase.optimizer, learner.config.clip_norm)
                phase.optimizer.step()
                learner.after_step()
                if batch.entering:
                    batch.entering.into(learner.memory, rows, processes)
                backward.clear()
                monitor.step(batch.weight)
        spent.images += round(phase.counted_images * run.images / len(phase.indices)) + run.drawn
        replayed = int(processes.sum_(torch.tensor(run.replayed, device=device)).item())
        spent.per_image = cost.per_image
        spent.per_exemplar = cost.per_exemplar
        spent.replays = cost.replays
        spent.operations += (cost.per_image or 0) * (run.images + run.drawn) + (cost.per_exemplar or 0) * replayed
        mean_loss = processes.sum_(total_loss).item() / run.done
        accuracy = 100 * processes.sum_(correct).item() / run.images
        learner.after_epoch(task, run, epoch, mean_loss)
        monitor.epoch_ended(task, run, epoch, mean_loss, accuracy)
    learner.over.weights.begin(None)


def _check_weighted(learner: Trainable) -> None:
    """Raise :class:`UnusableRun` if images have weights, which the loss has not used."""
    if learner.over.weights.table is not None and not learner.over.weights.used:
        raise UnusableRun(
            f"class_balance: the loss of '{learner.config.method}' does not use the images' weights; compute it with "
            'self.over.cross_entropy or self.over.weighted, or set class_balance to "sampler"'
        )
