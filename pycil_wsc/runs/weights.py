"""The trained weights that a run keeps (``"save_weights"``): ``weights.pt``, or a file per task."""

import dataclasses
import os
import re
from pathlib import Path

from pycil_wsc.config.options import Config
from pycil_wsc.errors import UserError
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.old_formats import load_state
from pycil_wsc.state import State, save_state


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
    save_state(_path(folder, task), state)
    if task is not None:
        _path(folder, None).unlink(missing_ok=True)  # of the same run with fewer tasks


def read(path: Path, remedy: str) -> State:
    """What :func:`save` wrote. Raises a :class:`UserError`, which ends with ``remedy``, if the file is damaged."""
    try:
        return load_state(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path}: is not a complete file of weights ({error}); {remedy}") from None


def _path(folder, task):
    return Path(folder, "weights.pt" if task is None else f"weights-task{task}.pt")


def find(folder: Path, task: int | None) -> Path:
    """The file with the weights after ``task`` (None: the last ones); raises a :class:`UserError` if there is none."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; name the folder of a run")
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); make it readable") from None
    kept = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"weights-task(\d+)\.pt", name)))
    final = _path(folder, None)
    if task is None and (final.name in names or kept):
        return final if final.name in names else _path(folder, kept[-1])
    if task in kept:
        return _path(folder, task)
    if kept or final.name in names:
        available = ", ".join([*map(str, kept), *(["the last (task=None)"] if final.name in names else [])])
        raise UserError(
            f'{folder}: no weights of task {task}, only of {available}; "save_weights": "every" saves them after every '
            "task"
        )
    if "result.json" in names:
        raise UserError(
            f'{folder}: this finished run did not save its weights; repeat it with --redo and "save_weights": true'
        )
    raise UserError(f'{folder}: no weights there (yet); name the folder of a run that ended with "save_weights": true')
