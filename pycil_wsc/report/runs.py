"""Finds, reads and checks the runs below some folders. Unusable files are reported and left unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pycil_wsc.config.options import ALL
from pycil_wsc.errors import UnusableRun
from pycil_wsc.files import REPLACED, RESULT_SCHEMA
from pycil_wsc.report.names import clean

HUGE = 1e18  # larger numbers are rejected
STUDIED = {  # the keys that the paper's studies vary, with the values of the paper's method
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "exemplars": "herding",
}
ANALYSIS_NAMES = ("gradients", "drift", "flatness", "dormant")
Problem = tuple[Any, str]  # a path, and what is wrong with it


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run: the contents of its ``result.json``, the file's path, and the records of its analyses."""

    data: dict[str, Any]
    path: Path | None = None
    analyses: list[dict[str, Any]] = field(default_factory=list)  # records of ``analyse``: a dict per task

    @property
    def config(self) -> dict[str, Any]:
        return self.data["config"]

    @cached_property
    def method(self) -> str:
        """The learner's name, with ``+wsc`` if it is combined with Weight Space Consolidation."""
        consolidated = self.config.get("consolidate") and self.config["model_name"] != "wsc"
        return self.config["model_name"] + "+wsc" * bool(consolidated)

    @property
    def keeps_all(self) -> bool:
        """Whether the memory keeps every image."""
        return self.config["fixed_memory"] and self.config["memory_per_class"] == ALL

    @cached_property
    def memory(self) -> float:
        """The number of exemplars: per class if the memory is fixed, else in total.

        If the memory keeps every image: the mean number of training images per class, or ``ALL`` if it is unknown.
        """
        if not self.config["fixed_memory"]:
            return self.config["memory_size"]
        return self._images_per_class() if self.keeps_all else self.config["memory_per_class"]

    def _images_per_class(self) -> int:
        images, classes = (self.data.get("data") or {}).get("train"), self.data.get("class_names")
        if not images or not classes or self.part:  # ``images`` are those of all classes, ``classes`` the learned ones
            return ALL
        mean, share = round(images / len(classes)), self.config.get("validation_split")
        return mean - min(max(1, round(share * mean)), mean - 1) if share else mean  # as ``hold_out`` rounds

    @property
    def part(self) -> dict[str, Any]:
        """The keys that restrict the run to a part of its data. A ``max_tasks`` above the number of tasks does not."""
        part = {name: value for name in ("max_tasks", "classes") if (value := self.config.get(name))}
        if "max_tasks" in part and part["max_tasks"] > len(self.curve):
            del part["max_tasks"]
        return part

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @cached_property
    def dataset(self) -> str:
        """The name of the data set, or of the first of a stream of tasks."""
        return (self.config.get("tasks") or [self.config["dataset"]])[0]

    @cached_property
    def split(self) -> tuple[int, int]:
        """Numbers of classes of the first task and of each later one; (0, 0) for a stream of tasks."""
        return (0, 0) if self.config.get("tasks") else (self.config["init_cls"], self.config["increment"])

    @property
    def curve(self) -> list[float]:
        """Accuracy on all classes seen after each task, in percent."""
        return self.data["curve"]

    @property
    def average(self) -> float:
        """The mean of :attr:`curve`."""
        return self.data["avg_acc"]


def memory_text(memory: float) -> str:
    """A :attr:`Record.memory` in tables and figures."""
    return "all" if memory == ALL else f"{memory:,}"


@dataclass
class Found:
    """The contents of some folders: finished runs, unusable files with the reasons, and unfinished runs."""

    records: list[Record] = field(default_factory=list)
    language: list[Record] = field(default_factory=list)  # finished runs of language models
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)  # (folder, tasks done)


def find_runs(places: Iterable[str | Path]) -> Found:
    """Find the finished runs in ``places`` (files or folders): ``result.json``, and other ``*.json`` with a result.

    A result that was replaced, ``result.old.json``, is left out unless it is itself one of the ``places``.
    Does not raise an exception for any contents of a file.
    """
    found, seen = Found(), set()
    for path in _files(places, found.problems):
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            found.problems.append((path, f"cannot be read ({_reason(error)})"))
            continue
        if (status.st_dev, status.st_ino) not in seen:  # skip other names of the same file
            seen.add((status.st_dev, status.st_ino))
            _add(path, found)
    return found


def _files(places: Iterable[str | Path], problems: list[Problem]) -> Iterable[Path]:
    def unreadable(error: OSError) -> None:
        problems.append((error.filename, _reason(error)))

    for place in map(Path, places):
        if place.is_file():
            yield place
            continue
        for parent, folders, names in os.walk(place, onerror=unreadable):
            folders.sort()
            present = set(names)
            for name in sorted(present - {REPLACED}):
                if name.endswith(".json") or name == "metrics.jsonl" and "result.json" not in present:
                    yield Path(parent, name)


def _add(path: Path, found: Found) -> None:
    if path.name == "metrics.jsonl":
        lines, flaws = read_metrics(path)
        found.problems += [(path, flaw) for flaw in flaws]
        found.unfinished.append((path.parent, f"{len(lines)} task{'s' * (len(lines) != 1)} done"))
    elif path.suffix == ".json" and path.name != "config.json":
        try:
            data = _parsed(path)
            if path.name != "result.json" and not (isinstance(data, dict) and {"config", "curve"} & set(data)):
                return  # another kind of file
            data, flaws = _checked(path, data)
        except UnusableRun as error:
            found.problems.append((path, str(error).removeprefix(f"{path}: ")))
            return
        found.problems += [(path, flaw) for flaw in flaws]
        analyses_path = path.with_name("analyses.jsonl")
        analyses, flaws = read_analyses(analyses_path) if path.name == "result.json" else ([], [])
        found.problems += [(analyses_path, flaw) for flaw in flaws]
        (found.language if is_language_model(data) else found.records).append(Record(data, path, analyses))


def is_language_model(data: Any) -> bool:
    """Whether these are the contents of a language model's ``result.json``."""
    return isinstance(data, dict) and data.get("kind") == "llm"


def read_result(path: str | Path) -> dict[str, Any]:
    """The contents of a ``result.json``; raises ``UnusableRun`` if it is incomplete or of another version."""
    return _checked(Path(path), _parsed(Path(path)))[0]


def read_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The valid lines of a ``metrics.jsonl``, and the problems of the others."""
    return _read_lines(
        Path(path),
        lambda line: NUMBER(line.get("cnn_top1"), line) or _numbers(line.get("trace")),
        "no task or cnn_top1",
    )


def read_analyses(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The valid lines of an ``analyses.jsonl``, if it exists, and the problems of the others."""
    if not Path(path).exists():
        return [], []
    return _read_lines(
        Path(path),
        lambda line: (
            NUMBER(line.get("share_new"), line) and all(isinstance(line.get(name, {}), dict) for name in ANALYSIS_NAMES)
        ),
        "no task, or an analysis that is not as expected",
    )


def _read_lines(path: Path, fits: Callable[[Any], bool], lacking: str) -> tuple[list[dict[str, Any]], list[str]]:
    lines, flaws = [], []
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        return lines, [f"cannot be read ({_reason(error)})"]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            flaws.append(f"line {number} is incomplete; skipped")
            continue
        if isinstance(value, dict) and NUMBER(value.get("task"), value) and fits(value):
            lines.append(value)
        else:
            flaws.append(f"line {number} is of another version ({lacking}); skipped")
    return lines, flaws


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UnusableRun(f"{path}: cannot be read ({_reason(error)}); make it readable") from None
    except (ValueError, RecursionError):
        raise UnusableRun(f"{path}: is not a complete result; delete it to run this again") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _checked(path: Path, data: Any) -> tuple[dict[str, Any], list[str]]:
    """``data`` without malformed optional values, and the problems of these; raises ``UnusableRun`` if unusable."""
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        raise UnusableRun(f"{path}: is not a complete result; delete it to run this again")
    schema = data.get("schema", 1)
    if schema not in range(1, RESULT_SCHEMA + 1):
        raise UnusableRun(
            f"{path}: is a result of another version (schema {clean(schema)}, supported: 1 to {RESULT_SCHEMA}); "
            "update pycil_wsc"
        )
    language = is_language_model(data)
    for name, fits in (LANGUAGE if language else REQUIRED).items():
        place = data["config"] if name.startswith("config.") else data
        value = place.get(name.removeprefix("config."))
        if not fits(value, data):
            state = "missing" if value is None else "not as expected"
            raise UnusableRun(
                f"{path}: is a result of another version ('{name}' is {state}); move it away to run this again"
            )
    optional = LANGUAGE_OPTIONAL if language else OPTIONAL
    malformed = [name for name, fits in optional.items() if data.get(name) is not None and not fits(data[name], data)]
    flaws = [f"'{name}' is not as expected; left out" for name in malformed]
    return {name: value for name, value in data.items() if name not in malformed}, flaws


# ---- the values used from a result -----------------------------------------------------------------------------------
# A report is made of many folders, copied and edited by many people, and one damaged result must not stop it.


Test = Callable[[Any, Mapping[str, Any]], bool]  # checks a value, given the whole result


def _is(kind: type, least: float = -HUGE) -> Test:
    """A test that a value has the type ``kind`` (an integer is also a ``float``) and, if a number, is >= ``least``."""
    if kind in (int, float):
        return lambda value, _: type(value) in (int, kind) and least <= value < HUGE
    return lambda value, _: type(value) is kind


def _like(default: Any) -> Test:
    """A test that a value is None or of the type of ``default``."""
    tests = [_is(str), _is(int)] if default == "once" else [_is(type(default))]
    return lambda value, data: value is None or any(fits(value, data) for fits in tests)


def _numbers(value: Any, depth: int = 1) -> bool:
    """Whether ``value`` is numbers in non-empty lists of depth ``depth``."""
    for _ in range(depth - 1):  # flattened, because one large array is faster to check than many small ones
        if not isinstance(value, list) or not value or not all(isinstance(item, list) and item for item in value):
            return False
        value = list(chain.from_iterable(value))
    if not isinstance(value, list) or not value or not set(map(type, value)) <= {int, float}:
        return False
    try:
        return bool(np.abs(np.array(value, dtype=float)).max() < HUGE)
    except OverflowError:
        return False


def _lower(value: Any, tasks: list[Any]) -> bool:
    """Whether ``value`` is a lower triangle: the accuracies on tasks 0..t after task t."""
    return _numbers(value, 2) and [len(row) for row in value] == list(range(1, len(tasks) + 1))


def _named_numbers(value: Any) -> bool:
    return isinstance(value, dict) and (not value or _numbers([*value.values()]))


def _names(value: Any, _: Any = None) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _scores(value: Any, data: Mapping[str, Any]) -> bool:
    numbers = ("last_average", "new_score", "forgetting")
    return isinstance(value, dict) and all(
        isinstance(part := value.get(version), dict)
        and _lower(part.get("matrix"), data["tasks"])
        and _numbers([part.get(name) for name in numbers])
        for version in ("trace", "fixed")
    )


NUMBER = _is(float)
REQUIRED: Mapping[str, Test] = {
    **dict.fromkeys(("config.model_name", "config.dataset", "config.convnet_type"), _is(str)),
    "config.fixed_memory": _is(bool),
    **dict.fromkeys(("config.init_cls", "config.increment"), _is(int, 1)),
    **dict.fromkeys(("config.memory_per_class", "config.memory_size"), _is(int, 0)),
    **dict.fromkeys(("config.init_epoch", "config.epochs", "config.seed"), _is(int, 0)),
    **{f"config.{name}": _like(value) for name, value in STUDIED.items()},
    "config.tasks": lambda value, _: value is None or _names(value),
    "config.validation_split": lambda value, data: value is None or _is(float, 0)(value, data) and value < 1,
    "curve": lambda value, _: _numbers(value),
    "matrix": lambda value, data: _lower(value, data["curve"]),
    **dict.fromkeys(("avg_acc", "last_acc", "forgetting", "new_acc"), NUMBER),
    **dict.fromkeys(("train_seconds", "total_seconds", "images_trained", "peak_memory_bytes"), NUMBER),
}
OPTIONAL: Mapping[str, Test] = {
    **dict.fromkeys(
        ("top5_curve", "nme_curve", "task_known_curve"),
        lambda value, data: _numbers(value) and len(value) == len(data["curve"]),
    ),
    "train_loss": lambda value, data: _numbers(value, 2) and len(value) == len(data["curve"]),
    "confusion": lambda value, _: _numbers(value, 2) and {len(row) for row in value} == {len(value)},
    "class_names": _names,
    "data": lambda value, data: isinstance(value, dict) and _is(int, 1)(value.get("train"), data),
    **dict.fromkeys(("parameters", "train_seconds_spent"), NUMBER),
    **dict.fromkeys(("importance_seconds", "importance_bytes", "importance_passes"), NUMBER),
}
LANGUAGE: Mapping[str, Test] = {
    **dict.fromkeys(("config.llm.method", "config.llm.data", "config.llm.model"), _is(str)),
    "config.llm.replay_ratio": _is(float, 0),
    "config.seed": _is(int, 0),
    "tasks": _names,
    "scores": _scores,
    **dict.fromkeys(("avg_score", "train_minutes", "relative_vram_minutes", "peak_memory_bytes"), NUMBER),
    **dict.fromkeys(("models_resident", "models_resident_streamed", "relative_vram_minutes_streamed"), NUMBER),
    **dict.fromkeys(("tokens_trained", "tokens_per_second", "padding"), NUMBER),
}
LANGUAGE_OPTIONAL: Mapping[str, Test] = {
    "trivial": lambda value, _: (
        isinstance(value, dict)
        and all(isinstance(tasks, dict) and all(map(_named_numbers, tasks.values())) for tasks in value.values())
    ),
    "warnings": _names,
}
