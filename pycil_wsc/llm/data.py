"""Tasks of prompts and answers in TRACE's folder format, and the choice of items to replay.

A task is a folder below the data root, ``<root>/<name>/{train,eval,test}.json``: each file a JSON list of rows
``{"prompt": text, "answer": text}``. To add a task, add a folder. An optional ``task.json`` in it sets how the task is
scored and trained, by some or all of ``{"metric": "rouge_l", "epochs": 3}``; it overrides
:data:`TASKS`.

TRACE (Wang et al., 2023) is read as its authors publish it, in any of its sizes. Do not mix sizes: their splits differ.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.llm.metrics import METRICS


@dataclass(frozen=True)
class Item:
    prompt: str
    answer: str


@dataclass(frozen=True)
class TaskInfo:
    """How a task is scored and trained.

    ``metric`` is one of :data:`~pycil_wsc.llm.metrics.METRICS`, ``epochs`` the passes over the task's own data.
    """

    metric: str = "exact_match"
    epochs: int = 5


@dataclass(frozen=True)
class TaskData:
    """A task's items by split. ``eval`` is empty if the folder has no ``eval.json``."""

    name: str
    train: tuple[Item, ...]
    eval: tuple[Item, ...]
    test: tuple[Item, ...]
    info: TaskInfo = TaskInfo()


TASKS = {  # in TRACE's order, with its epochs
    "C-STANCE": TaskInfo("exact_match", 5),
    "FOMC": TaskInfo("exact_match", 3),
    "MeetingBank": TaskInfo("rouge_l", 7),
    "Py150": TaskInfo("edit_similarity", 5),
    "ScienceQA": TaskInfo("choice", 3),
    "NumGLUE-cm": TaskInfo("exact_match", 5),
    "NumGLUE-ds": TaskInfo("exact_match", 5),
    "20Minuten": TaskInfo("sari", 7),
}


def load_task(root: str | Path, name: str) -> TaskData:
    """The :class:`TaskData` in ``<root>/<name>``. For bad data, raises :class:`UserError` with the file and row."""
    folder = _task_folder(root, name)
    evaluation = _items(folder / "eval.json") if (folder / "eval.json").exists() else ()
    return TaskData(
        name,
        _items(folder / "train.json"),
        evaluation,
        _items(folder / "test.json"),
        _info(folder, TASKS.get(name, TaskInfo())),
    )


def load_pool(root: str | Path, name: str) -> tuple[Item, ...]:
    """The training items of ``<root>/<name>``, all of which are replayed with every task."""
    return _items(_task_folder(root, name) / "train.json")


def replay_items(
    earlier: Iterable[TaskData], ratio: float, choice: str = "head", seed: int = 0, pool: Iterable[Item] = ()
) -> list[Item]:
    """The items of the replay epoch after a task: all of ``pool``, then ``int(N * ratio)`` items of each earlier task.

    ``choice``: ``"head"`` takes the first training items of the file, as TRACE does; ``"random"`` draws them. The draw
    depends on ``seed`` and the task's name alone, so neither the other tasks nor their order change it, and a larger
    ratio adds items to those of a smaller one.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio={ratio}: the share of a task's items to replay must be in 0..1")
    if choice not in ("head", "random"):
        raise ValueError(f"choice={choice!r} is unknown; known: 'head', 'random'")
    items = list(pool)
    for task in earlier:
        count = int(len(task.train) * ratio)
        order = range(len(task.train)) if choice == "head" else _shuffled(len(task.train), seed, task.name)
        items += [task.train[i] for i in order[:count]]
    return items


def warnings_of(tasks: Iterable[TaskData]) -> list[str]:
    """Properties of the data that make scores on it doubtful, such as leaked prompts: lines that name their task."""
    return [f"{task.name}: {warning}" for task in tasks for warning in _warnings(task)]


def _warnings(task: TaskData) -> Iterator[str]:
    train, evaluation, test = ({item.prompt for item in split} for split in (task.train, task.eval, task.test))
    leaked = sum(item.prompt in train for item in task.test)
    if leaked:
        yield f"{leaked} of {len(task.test)} test prompts are training prompts too; their scores show memory, not skill"
    for split, prompts in (("train", train), ("test", test)):
        rows = len(getattr(task, split))
        if len(prompts) < rows:
            yield f"{split} has {len(prompts)} different prompts in {rows} rows; the others repeat them"
    if evaluation and evaluation == test:
        yield "eval and test hold the same prompts; do not choose anything by eval"
    elif shared := len(evaluation & test):
        yield f"{shared} of {len(test)} different test prompts are in eval too; do not choose anything by eval"


def _shuffled(count: int, seed: int, name: str) -> np.ndarray:
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(count)


def _task_folder(root: str | Path, name: str) -> Path:
    folder = Path(root).expanduser() / name
    if not folder.is_dir():
        known = (
            sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir()) if folder.parent.is_dir() else []
        )
        hint = did_you_mean(name, known) if known else f" (a relative path starts at {os.getcwd()})"
        raise UserError(
            f"{folder}: no such folder{hint}; a task is a folder with train.json and test.json in TRACE's format"
        )
    return folder


def _info(folder: Path, known: TaskInfo) -> TaskInfo:
    """``known``, overridden by ``task.json`` if there is one."""
    path = folder / "task.json"
    if not path.exists():
        return known
    given = _json(path, 'an object such as {"metric": "rouge_l"}')
    if not isinstance(given, dict):
        raise UserError(f'{path}: not a JSON object; write for example {{"metric": "rouge_l"}}')
    names = [field.name for field in fields(TaskInfo)]
    for key, value in given.items():
        if key not in names:
            raise UserError(f"{path}: unknown key '{key}'{did_you_mean(key, names)}")
        if key == "epochs" and (type(value) is not int or value < 1):
            raise UserError(f"{path}: 'epochs' is {json.dumps(value)}; give a whole number from 1")
        if key != "epochs" and not isinstance(value, str):
            raise UserError(f"{path}: '{key}' is {json.dumps(value)}; give a string such as \"{asdict(known)[key]}\"")
        if key == "metric" and value not in METRICS:
            raise UserError(f"{path}: unknown metric '{value}'{did_you_mean(value, METRICS)}")
    return replace(known, **given)


def _items(path: Path) -> tuple[Item, ...]:
    rows = _json(path, "a list of rows")
    if not isinstance(rows, list) or not rows:
        problem = "an empty list" if rows == [] else f"not a list but {_kind(rows)}"
        raise UserError(f'{path}: {problem}; a split is a JSON list of rows {{"prompt": text, "answer": text}}')
    return tuple(_item(path, number, row) for number, row in enumerate(rows, 1))


def _item(path: Path, number: int, row: Any) -> Item:
    place = f"{path}, row {number}"
    if not isinstance(row, dict):
        raise UserError(f'{place} (counted from 1): {_kind(row)}; a row is {{"prompt": text, "answer": text}}')
    for key in ("prompt", "answer"):
        if key not in row:
            raise UserError(
                f"{place} (counted from 1): no '{key}'{did_you_mean(key, row)}; "
                "give each row both 'prompt' and 'answer'"
            )
        if not isinstance(row[key], str):
            raise UserError(f"{place} (counted from 1): '{key}' is {_kind(row[key])}; write it as a string in quotes")
        if not _is_unicode(row[key]):
            raise UserError(
                f"{place} (counted from 1): '{key}' has half a surrogate pair (\\ud800 to \\udfff); "
                "correct or remove the row"
            )
    if not row["answer"].strip():
        raise UserError(
            f"{place} (counted from 1): 'answer' is empty, so there is nothing to learn or to score; "
            "fill it in or remove the row"
        )
    return Item(row["prompt"], row["answer"])


def _json(path: Path, wanted: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; it must hold {wanted}, as JSON") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg}); it must hold {wanted}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON in UTF-8 ({error}); it must hold {wanted}") from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
