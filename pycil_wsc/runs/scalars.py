"""Writes a run's scalars for TensorBoard and for Weights & Biases: the same ones.

Steps of ``train`` are the run's epochs, those of ``test`` its tasks, counted from 0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pycil_wsc.config.image_config import Config
from pycil_wsc.files import Json
from pycil_wsc.results import metrics

History = Sequence[Mapping[str, Json]]  # the lines of metrics.jsonl so far
STEPS = {"train": "epoch", "test": "task"}


class Scalars:
    """The scalars of a run in ``folder``, which stands after ``history`` and ``curves``, those of the current task."""

    def __init__(self, config: Config, folder: Path, history: History, curves: Mapping[str, Sequence[float]]) -> None:
        self.writers: list[TensorBoard | WandB] = []
        if config.wandb:
            self.writers.append(WandB(folder, config))
            self.epochs = 0
            for number, line in enumerate(history, 1):  # a resumed run is written again
                self.epochs_ended(line)
                self.task_ended(history[:number])
            self.epochs_ended(curves)
        self.epochs = sum(len(line["train_loss"]) for line in [*history, curves])
        if config.tensorboard:
            self.writers.append(TensorBoard(folder / "tensorboard", self.epochs, len(history)))

    def epoch_ended(self, **values: float) -> None:
        """``values``: loss and accuracy and, if this run trained the epoch, learning rate and speed."""
        self._write("train", self.epochs, values)
        self.epochs += 1

    def epochs_ended(self, curves: Mapping[str, Sequence[float]]) -> None:
        """Epochs that an earlier process, or another run, has trained."""
        for loss, accuracy in zip(curves["train_loss"], curves["train_accuracy"]):
            self.epoch_ended(loss=loss, accuracy=accuracy)

    def task_ended(self, history: History) -> None:
        self._write("test", history[-1]["task"], metrics.task_scalars(history))

    def close(self) -> None:
        """Finish writing."""
        for writer in self.writers:
            writer.close()

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        for writer in self.writers:
            writer.write(group, step, named)


class TensorBoard:
    """Event files in ``folder``, of epochs and of tasks.

    A run that resumes after ``epochs`` epochs and ``tasks`` tasks discards scalars written beyond these. Each call
    flushes to the disk, so that scalars are written before the checkpoint.
    """

    def __init__(self, folder: Path, epochs: int, tasks: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self.writers = {
            "train": SummaryWriter(str(folder / "epochs"), purge_step=epochs),
            "test": SummaryWriter(str(folder / "tasks"), purge_step=tasks),
        }

    def write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writers[group].add_scalar(name, value, step)
        self.writers[group].flush()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class WandB:
    """An offline run of Weights & Biases in ``folder``. ``wandb sync`` uploads it; ``WANDB_MODE`` sets another mode."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb  # optional dependency

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        mode: Json = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            dir=str(folder),
            mode=mode,
            project=config.prefix,
            name="/".join(folder.parts[-3:]),
            config=config.to_dict(),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        for group, step in STEPS.items():
            self.run.define_metric(step)
            self.run.define_metric(f"{group}/*", step_metric=step)

    def write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({STEPS[group]: step, **values})

    def close(self) -> None:
        self.run.finish()
