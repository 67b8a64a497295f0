"""The trained weights that a run keeps (``"save_weights"``): ``weights.pt``, or a file per task."""

import dataclasses
from pathlib import Path

from pycil_wsc.config.options import Config
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.state import save_state

FINAL = "weights.pt"


def save(folder: Path, learner: BaseLearner, config: Config, task: int | None = None) -> None:
    """Save the weights after ``task`` (None: the last one), with everything that :func:`pycil_wsc.load` needs."""
    manager = learner.manager
    state = {
        "learner": learner.state_dict(),
        "config": config.to_dict(),
        "info": dataclasses.asdict(learner.train_source.info),  # class names, image size, mean, std, crop
        "class_order": manager.class_order,
        "boundaries": manager.boundaries,
        "task": len(manager.tasks) - 1 if task is None else task,
    }
    save_state(folder / (FINAL if task is None else f"weights-task{task}.pt"), state)
    if task is not None:
        (folder / FINAL).unlink(missing_ok=True)  # of the same run with fewer tasks
