"""Writes a run's scalars for TensorBoard."""

from pathlib import Path

from pycil_wsc.files import Json
from pycil_wsc.results import metrics


class Scalars:
    """Event files in ``folder``: in ``epochs``, steps are the run's epochs, in ``tasks`` its tasks, counted from 0.

    A run that resumes after ``epochs`` epochs and ``tasks`` tasks discards scalars written beyond these. Each call
    flushes to the disk, so that scalars are written before the checkpoint.
    """

    def __init__(self, folder: Path, epochs: int, tasks: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self.epochs = SummaryWriter(str(folder / "epochs"), purge_step=epochs)
        self.tasks = SummaryWriter(str(folder / "tasks"), purge_step=tasks)

    def epoch_ended(self, epoch: int, **values: float) -> None:
        """``values``: loss and accuracy and, if this run trained the epoch, learning rate and speed."""
        _write(self.epochs, epoch, "train", values)

    def task_ended(self, history: list[dict[str, Json]]) -> None:
        """``history``: the lines of ``metrics.jsonl`` so far."""
        _write(self.tasks, history[-1]["task"], "test", metrics.task_scalars(history))

    def close(self) -> None:
        self.epochs.close()
        self.tasks.close()


def _write(writer, step, group, values):
    for name, value in values.items():
        writer.add_scalar(f"{group}/{name}", value, step)
    writer.flush()
