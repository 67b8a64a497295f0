"""Writes a run's scalars for TensorBoard and for Weights & Biases: the same ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pycil_wsc.files import Json
from pycil_wsc.results import metrics

History = Sequence[Mapping[str, Json]]  # the lines of metrics.jsonl so far


class Scalars:
    """Where scalars go. Steps of ``train`` are the run's epochs, those of ``test`` its tasks, counted from 0."""

    def epoch_ended(self, epoch: int, **values: float) -> None:
        """``values``: loss and accuracy and, if this run trained the epoch, learning rate and speed."""
        self.write("train", epoch, values)

    def task_ended(self, history: History) -> None:
        self.write("test", history[-1]["task"], metrics.task_scalars(history))

    def write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Finish writing."""
        raise NotImplementedError


class TensorBoard(Scalars):
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
            self.writers[group].add_scalar(f"{group}/{name}", value, step)
        self.writers[group].flush()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class WandB(Scalars):
    """An offline run of Weights & Biases in ``folder``. ``wandb sync`` uploads it; ``WANDB_MODE`` sets another mode.

    A resumed run writes it again from ``history`` and ``curves`` (those of the current task). Learning rate and speed
    are then missing for earlier epochs.
    """

    STEPS = {"train": "epoch", "test": "task"}

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Json],
        name: str,
        history: History,
        curves: Mapping[str, Sequence[float]],
    ) -> None:
        import wandb  # optional dependency

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        mode: Json = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            dir=str(folder),
            mode=mode,
            project=str(config["prefix"]),
            name=name,
            config=dict(config),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        for step in self.STEPS.values():
            self.run.define_metric(step)
        for group, step in self.STEPS.items():
            self.run.define_metric(f"{group}/*", step_metric=step)
        epoch = 0
        for number, line in enumerate([*history, curves], 1):
            for loss, accuracy in zip(line["train_loss"], line["train_accuracy"]):
                self.epoch_ended(epoch, loss=loss, accuracy=accuracy)
                epoch += 1
            if number <= len(history):
                self.task_ended(history[:number])

    def write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({self.STEPS[group]: step} | {f"{group}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self.run.finish()
