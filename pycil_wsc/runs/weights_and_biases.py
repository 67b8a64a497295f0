"""Writes a run's scalars for Weights & Biases: the same ones as :mod:`pycil_wsc.runs.tensorboard`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pycil_wsc.files import Json
from pycil_wsc.results import metrics


class WandB:
    """An offline run of Weights & Biases in ``folder``. ``wandb sync`` uploads it; ``WANDB_MODE`` sets another mode.

    A resumed run writes it again from ``history`` (the lines of ``metrics.jsonl``) and ``curves`` (those of the current
    task). Learning rate and speed are then missing for earlier epochs.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Json],
        name: str,
        history: Sequence[Mapping[str, Json]],
        curves: Mapping[str, Sequence[float]],
    ) -> None:
        import wandb  # optional dependency

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            dir=str(folder),
            mode=cast(Any, os.environ.get("WANDB_MODE", "offline")),
            project=str(config["prefix"]),
            name=name,
            config=dict(config),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self.run.define_metric("epoch")
        self.run.define_metric("task")
        self.run.define_metric("train/*", step_metric="epoch")
        self.run.define_metric("test/*", step_metric="task")
        epoch = 0
        for number in range(len(history) + 1):
            done = history[number] if number < len(history) else curves
            for loss, accuracy in zip(done["train_loss"], done["train_accuracy"]):
                self.epoch_ended(epoch, loss=loss, accuracy=accuracy)
                epoch += 1
            if number < len(history):
                self.task_ended(history[: number + 1])

    def epoch_ended(self, epoch: int, **values: float) -> None:
        """``values``: loss and accuracy and, if this run trained the epoch, learning rate and speed."""
        self.run.log({"epoch": epoch} | {f"train/{name}": value for name, value in values.items()})

    def task_ended(self, history: Sequence[Mapping[str, Json]]) -> None:
        """``history``: the lines of ``metrics.jsonl`` so far."""
        values = metrics.task_scalars(history)
        self.run.log({"task": history[-1]["task"]} | {f"test/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Finish writing the run's files."""
        self.run.finish()
