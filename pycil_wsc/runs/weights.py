"""The trained weights that a run keeps (``"save_weights"``): ``weights.pt``, or a file per task."""

import dataclasses
import re
from pathlib import Path

from pycil_wsc.config.options import Config
from pycil_wsc.errors import UserError
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


def find(folder: Path, task: int | None) -> Path:
    """The file with the weights after ``task`` (None: the last ones); raises a :class:`UserError` if there is none."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); name the folder of a run") from None
    kept = {int(match[1]): match[0] for name in names if (match := re.fullmatch(r"weights-task(\d+)\.pt", name))}
    found = kept.get(max(kept, default=0) if task is None else task)
    if task is None and FINAL in names:
        found = FINAL
    if found:
        return folder / found
    if kept or FINAL in names:
        available = [*map(str, sorted(kept)), *["the last (task=None)"] * (FINAL in names)]
        raise UserError(
            f"{folder}: no weights of task {task}, only of {', '.join(available)}; "
            '"save_weights": "every" saves them after every task'
        )
    problem = "this finished run did not save its weights" if "result.json" in names else "no weights there (yet)"
    raise UserError(f'{folder}: {problem}; "save_weights": true saves them, in a finished run with --redo')
