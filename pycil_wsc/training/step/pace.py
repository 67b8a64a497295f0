"""How the training loop goes through a phase: epochs, steps, learning rates and, if the budget is one, seconds."""

import time
from collections.abc import Iterable, Iterator

from pycil_wsc.data.batches.order import batch_slices
from pycil_wsc.training.batch import Batch
from pycil_wsc.training.optimization import set_rate
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.toolbox import Toolbox


class Pace:
    """How a phase runs: its epochs, the batches of each, and the learning rate before each step."""

    def __init__(self, learner: Toolbox, phase: Phase, first: int) -> None:
        self.learner, self.phase, self.first = learner, phase, first
        self.batches = learner.num_batches(len(phase.indices), phase.batch_size)
        self.by_step = learner.config.schedule_unit == "iteration"
        self.begun = 0.0  # when the epoch began
        self.done = 0  # steps of the epoch
        self.replayed = 0  # exemplars in these steps, in this process

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left. Sets the learning rate of each."""
        epoch, phase = self.first, self.phase
        while self.learner.spending.in_phase() < phase.seconds if phase.seconds else epoch < phase.epochs:
            self.begun = now()
            set_rate(phase.optimizer, phase.lr(self._position(epoch, 0)))
            yield epoch
            epoch += 1

    def steps(self, epoch: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch, up to the end of the budget."""
        phase = self.phase
        self.done = self.replayed = 0
        last = self.batches if phase.steps is None else min(self.batches, phase.steps - epoch * self.batches)
        for step, batch in enumerate(batches):
            if step == last or (phase.seconds and step and self._elapsed() >= phase.seconds):
                return
            if self.by_step or phase.seconds:
                set_rate(phase.optimizer, phase.lr(self._position(epoch, step)))
            self.done = step + 1
            self.replayed += batch.replayed or 0
            yield batch

    def images(self) -> int:
        """The number of images in the steps of the epoch so far, in all processes."""
        size = self.phase.batch_size or self.learner.config.batch_size
        slices = batch_slices(len(self.phase.indices), size, join=True)
        return slices[self.done - 1].stop

    def end_epoch(self, epoch: int) -> None:
        """Count the seconds of an epoch, whose last step the device has done."""
        if self.learner.config.task_seconds:
            self.learner.spending.seconds += now() - self.begun
        self.phase.reached = self._position(epoch + 1, 0, 0.0)

    def _elapsed(self):
        return self.learner.spending.in_phase() + now() - self.begun

    def _position(self, epoch, step, running=None):
        """The place in the schedule, in epochs."""
        phase = self.phase
        if not phase.seconds:
            return epoch + step / self.batches if self.by_step else epoch
        elapsed = self.learner.spending.in_phase() + (now() - self.begun if running is None else running)
        position = phase.epochs * min(1.0, elapsed / phase.seconds)
        return position if self.by_step else int(position)


def now() -> float:
    """The clock, in seconds."""
    return time.perf_counter()
