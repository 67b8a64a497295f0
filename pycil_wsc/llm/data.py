"""Tasks of prompts and answers in TRACE's folder format.

A task is a folder below the data root, ``<root>/<name>/{train,eval,test}.json``: each file a JSON list of rows
``{"prompt": text, "answer": text}`` or, for models with a chat template, ``{"messages": [{"role": "user", "content":
text}, ...]}``, whose last message is the answer. To add a task, add a folder. An optional ``task.json`` in it sets how
the task is scored and trained, by some or all of ``{"metric": "rouge_l", "epochs": 3}``; it overrides :data:`TASKS`.

TRACE (Wang et al., 2023) is read as its authors publish it, in any of its sizes. Do not mix sizes: their splits differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pycil_wsc.errors import UserError, did_you_mean
from pycil_wsc.files import Json, read_json, working_folder
from pycil_wsc.keys import declared, key
from pycil_wsc.llm.metrics import METRICS

ROW = 'rows {"prompt": text, "answer": text} or {"messages": [{"role": "user", "content": text}, ...]}'
ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """A message of a conversation; ``role`` is one of :data:`ROLES`."""

    role: str
    content: str


@dataclass(frozen=True)
class Item:
    """A ``prompt`` and its ``answer``; the prompt of a conversation is all of its turns before the answer."""

    prompt: str | tuple[Turn, ...]
    answer: str

    @property
    def question(self) -> str:
        """The text that is answered: the prompt, or its last turn."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1].content


@dataclass(frozen=True)
class TaskInfo:
    """How a task is scored and trained: the keys of ``task.json``."""

    metric: str = key("exact_match", "how answers are scored", choices=METRICS)
    epochs: int = key(5, "passes over the task's own data", low=1)


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
    train, test = (_items(folder / f"{split}.json") for split in ("train", "test"))
    evaluation = _items(folder / "eval.json") if (folder / "eval.json").exists() else ()
    return TaskData(name, train, evaluation, test, _info(folder, TASKS.get(name, TaskInfo())))


def load_pool(root: str | Path, name: str) -> tuple[Item, ...]:
    """The training items of ``<root>/<name>``, all of which are replayed with every task."""
    return _items(_task_folder(root, name) / "train.json")


def warnings_of(task: TaskData) -> Iterator[str]:
    """Properties of the data that make scores on it doubtful, such as leaked prompts."""
    train, evaluation, test = ({item.prompt for item in split} for split in (task.train, task.eval, task.test))
    leaked = len([item for item in task.test if item.prompt in train])
    if leaked:
        yield f"{leaked} of {len(task.test)} test prompts are training prompts too; their scores show memory, not skill"
    for split, prompts in (("train", train), ("test", test)):
        rows = len(getattr(task, split))
        if len(prompts) < rows:
            yield f"{split} has {len(prompts)} different prompts in {rows} rows; the others repeat them"
    shared = len(evaluation & test)
    if evaluation and evaluation == test:
        yield "eval and test hold the same prompts; do not choose anything by eval"
    elif shared:
        yield f"{shared} of {len(test)} different test prompts are in eval too; do not choose anything by eval"


def _task_folder(root: str | Path, name: str) -> Path:
    folder = Path(root).expanduser() / name
    if not folder.is_dir():
        hint = f" (a relative path starts at {working_folder()})"
        if folder.parent.is_dir():
            hint = did_you_mean(name, sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir()))
        raise UserError(
            f"{folder}: no such folder{hint}; a task is a folder with train.json and test.json in TRACE's format"
        )
    return folder


def _info(folder: Path, known: TaskInfo) -> TaskInfo:
    """``known``, overridden by ``task.json`` if there is one."""
    path = folder / "task.json"
    keys = declared(TaskInfo)
    if not path.exists():
        return known
    given = read_json(path)
    if not isinstance(given, dict):
        raise UserError(f'{path}: not a JSON object; write for example {{"metric": "rouge_l"}}')
    for name in given:
        if name not in keys:
            raise UserError(f"{path}: unknown key '{name}'{did_you_mean(name, keys)}")
    try:
        return replace(known, **{name: keys[name].check(value) for name, value in given.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _items(path: Path) -> tuple[Item, ...]:
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: not a list of {ROW}, at least one")
    return tuple(_item(row, f"{path}, row {number} (counted from 1)") for number, row in enumerate(rows, 1))


def _item(row: Json, place: str) -> Item:
    """The item of a row at this ``place``. Other keys of the row are ignored."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: not an object; a split is a list of {ROW}")
    if "messages" in row and not row.keys() & {"prompt", "answer"}:
        item = _conversation(row["messages"], f"{place}, 'messages'")
    else:
        item = Item(_text(row, "prompt", place), _text(row, "answer", place))
    if not item.answer.strip():
        raise UserError(f"{place}, 'answer': empty, so there is nothing to learn or to score")
    return item


def _conversation(messages: Json, place: str) -> Item:
    """The item of a list of messages: the last one is the answer."""
    if not isinstance(messages, list) or len(messages) < 2:
        raise UserError(f"{place}: not a list of two or more messages; a split is a list of {ROW}")
    turns = [_turn(message, f"{place}, message {number}") for number, message in enumerate(messages, 1)]
    *asked, answer = turns
    if answer.role != "assistant" or asked[-1].role != "user":
        raise UserError(
            f"{place}: ends with a message of {asked[-1].role} and one of {answer.role}; the last two must be a user's "
            "and the assistant's answer to it"
        )
    if any(turn.role == "system" for turn in turns[1:]):
        raise UserError(f"{place}: has a system prompt that is not the first message; put it first, or leave it out")
    return Item(asked[0].content if len(asked) == 1 else tuple(asked), answer.content)


def _turn(message: Json, place: str) -> Turn:
    if not isinstance(message, dict):
        raise UserError(f'{place}: not an object; a message is {{"role": "user", "content": text}}')
    turn = Turn(_text(message, "role", place), _text(message, "content", place))
    if turn.role not in ROLES:
        raise UserError(f"{place}: role '{turn.role}' is unknown{did_you_mean(turn.role, ROLES)}")
    return turn


def _text(row: dict[str, Json], name: str, place: str) -> str:
    text = row.get(name)
    if not isinstance(text, str):
        raise UserError(f"{place}: no text '{name}'; a split is a list of {ROW}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}, '{name}': has a lone surrogate (\\ud800 to \\udfff); remove it") from None
    return text
