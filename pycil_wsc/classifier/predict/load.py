"""The weights of a run as a classifier: ``pycil_wsc.load``."""

import re
from pathlib import Path

from pycil_wsc.classifier.predict.arguments import folder_of, refusing
from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.rebuild import Reached, checked_info, rebuilt, with_weights_elsewhere
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.runs.checkpoint import WEIGHTS, with_pretrained
from pycil_wsc.state import load_state
from pycil_wsc.training.learner import configured_backbone


def load(
    run_folder: str | Path, task: int | None = None, device: str = "cpu", pretrained: bool | str | None = None
) -> Classifier:
    """Load the :class:`Classifier` of a run with ``save_weights``.

    The data set and the result are not needed; a pre-trained backbone is, unless the run trained it.

    Args:
        run_folder: the folder of the run.
        task: load the weights after this task, counted from 0 (needs ``"every"``); None: the last saved ones.
        device: as in the configuration.
        pretrained: the weights of that backbone, as in the configuration; None: from where the run had them.

    Raises:
        UserError: if there are no weights, they cannot be used, or the backbone is another one.
    """
    path = weights_of(folder_of("run_folder", run_folder), task)
    again = "repeat the run with --redo"
    try:
        state = load_state(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path}: is not a complete file of weights ({error}); {again}") from None
    except MemoryError:
        raise UserError(f"{path}: there is not enough memory to load it; free some") from None
    with refusing(path, "a file of weights of this version", again, named=True):  # its checksums match
        info = checked_info(state["info"])
        values = without_dropped(state["config"])
        config = resolve(with_weights_elsewhere(values) | {"device": str(device)})
        reached = Reached(state["class_order"], state["boundaries"], state["task"])
        weights = values.get("pretrained", False) if pretrained is None else pretrained  # 0.1.0 has no such key
        learned = with_pretrained(state, lambda: configured_backbone(config, info.image_size, weights))
        learner = rebuilt(config, info, reached, learned)
        return Classifier(learner, info, reached.classes)


def weights_of(folder: Path, task: int | None) -> Path:
    """The file with the weights after ``task`` (None: the last ones); raises a :class:`UserError` if there is none."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); name the folder of a run") from None
    matches = [re.fullmatch(r"weights-task(\d+)\.pt", name) for name in names]
    kept = {int(match[1]): match[0] for match in matches if match}
    name = kept.get(max(kept, default=0) if task is None else task)
    if task is None and WEIGHTS in names:
        name = WEIGHTS
    if name:
        return folder / name
    if kept or WEIGHTS in names:
        available = list(map(str, sorted(kept)))
        if WEIGHTS in names:
            available.append("the last (task=None)")
        raise UserError(
            f"{folder}: no weights of task {task}, only of {', '.join(available)}; "
            '"save_weights": "every" saves them after every task'
        )
    problem = "this finished run did not save its weights" if "result.json" in names else "no weights there (yet)"
    raise UserError(f'{folder}: {problem}; "save_weights": true saves them, in a finished run with --redo')
