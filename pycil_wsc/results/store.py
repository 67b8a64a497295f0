"""Finds, reads and writes the results of runs. Unusable files are reported and left unchanged."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pycil_wsc.config.image_config import in_file
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve_recorded
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import OtherSettings, UnusableRun, UserError, plural
from pycil_wsc.files import Json, read_file, remove, write_json
from pycil_wsc.results.identity import NAMED, STUDIED, Identity
from pycil_wsc.results.schema import HUGE, ImageResult, LanguageResult, Result, parse

RESULT = "result.json"  # in a run's folder
METRICS = "metrics.jsonl"  # a line per task
ANALYSES = "analyses.jsonl"  # likewise, of runs with analyses
REPLACED = "result.old.json"  # a result that was set aside to do its run again; further ones are result.old.2.json, ...
Problem = tuple[Path | str | None, str]  # a path, and what is wrong with it


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run: its result, the file's path, and the records of its analyses, a dict per task."""

    result: Result
    path: Path | None = None
    analyses: list[dict[str, Json]] = field(default_factory=list)

    @classmethod
    def of(cls, contents: Json, path: Path | None = None) -> Record:
        """The record with these contents of a result."""
        return cls(parse(contents, path or RESULT)[0], path)

    @cached_property
    def data(self) -> dict[str, Json]:
        """The contents of the result."""
        return self.result.contents()

    @property
    def config(self) -> dict[str, Json]:
        return self.data["config"]

    @property
    def identity(self) -> Identity:
        assert self.result.identity is not None, "only while a result is being read"
        return self.result.identity

    @property
    def method(self) -> str:
        return self.identity.method

    @property
    def memory(self) -> float:
        return self.identity.memory

    @property
    def seed(self) -> int:
        return self.identity.seed

    def decisive(self) -> dict[str, Json]:
        """The keys of the configuration that decide the result, as in a JSON file that repeats the run."""
        names = self.identity.variant.keys() | NAMED
        return in_file({name: value for name, value in self.config.items() if name in names})

    def studied(self, name: str) -> bool | float | str:
        """The value of a key of the paper's studies. Random exemplars count as the paper's: no study varies this."""
        value = self.config.get(name)
        if value is None or (name, value) == ("exemplars", "random"):
            return STUDIED[name]
        return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)

    @cached_property
    def changed(self) -> set[str]:
        """The keys of the paper's studies in which the run differs from the paper's method."""
        return {name for name, value in STUDIED.items() if self.studied(name) != value}

    @property
    def curve(self) -> list[float]:
        """Accuracy on all classes seen, or a language model's mean score on the tasks seen, after each task, in %."""
        if isinstance(self.result, LanguageResult):
            return [100 * sum(row) / len(row) for row in self.data["scores"]["trace"]["matrix"]]
        return self.data["curve"]

    @property
    def average(self) -> float:
        """The mean of an image run's curve, or a language model's mean score after the last task, in percent."""
        if isinstance(self.result, LanguageResult):
            return 100 * self.data["avg_score"]
        return self.data["avg_acc"]

    @property
    def expands(self) -> bool:
        """Whether the method's network grows with the tasks, or doubles."""
        return isinstance(self.result, ImageResult) and bool(self.result.expands)

    def analysed(self, name: str) -> list[dict[str, Json]]:
        """The records of one analysis, a dict per task; empty unless every task of the run has one."""
        lines = [line for line in self.analyses if line.get(name)]
        if [line["task"] for line in lines] != list(range(len(self.curve))):
            return []
        return [line[name] | {"share_new": line["share_new"]} for line in lines]


@dataclass
class Found:
    """The contents of some folders: finished runs, unusable files with the reasons, and unfinished runs."""

    records: list[Record] = field(default_factory=list)
    language: list[Record] = field(default_factory=list)  # finished runs of language models
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)  # (folder, tasks done)


# ---- one result ------------------------------------------------------------------------------------------------------


def write_result(folder: Path, result: Result) -> dict[str, Json]:
    """Write ``result.json`` into the folder of its run; returns its contents."""
    contents = result.contents()
    write_json(folder / RESULT, contents)
    return contents


def read_result(path: str | Path) -> dict[str, Json]:
    """The contents of a ``result.json``; raises ``UnusableRun`` if it is incomplete or of another version."""
    contents = _parsed(Path(path))
    parse(contents, path)
    return contents


def has_result(folder: Path) -> bool:
    """Whether the folder of a run has a result."""
    try:
        (folder / RESULT).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link to itself, which the result will replace
            return False
        raise UserError(
            f"{folder}: cannot be searched ({error.strerror}); make it accessible, or choose another folder with --out"
        ) from None
    return True


def is_finished(config: RunConfig) -> bool:
    """Whether the folder of a run has its result, and not that of a shorter run."""
    try:
        return finished_result(config) is not None
    except UnusableRun:  # reported when the result is needed
        return True


def finished_result(config: RunConfig) -> dict[str, Json] | None:
    """The result of a finished run, or None if there is none, or only that of the same run with fewer tasks.

    Raises :class:`OtherSettings` if it is of another run, and :class:`UnusableRun` if it is incomplete.
    """
    folder = run_folder(config)
    if not has_result(folder):
        return None
    path = folder / RESULT
    result = read_result(path)
    recorded = resolve_recorded(result["config"], path).identity()
    if recorded == config.identity():
        return result
    if config.continues(recorded):
        return None
    raise OtherSettings(f"{path}: was made with other settings; move it away, or set another prefix or out")


def set_result_aside(folder: Path, records: Iterable[str]) -> None:
    """Rename the result in the folder of a run, which is then no longer finished, and remove its other ``records``.

    These are patterns of files and folders, first of the checkpoint, from which the run would resume at its end.
    """
    for pattern in records:
        for path in folder.glob(pattern):
            remove(path)
    names = itertools.chain([REPLACED], (f"result.old.{number}.json" for number in itertools.count(2)))
    os.replace(folder / RESULT, next(folder / name for name in names if not (folder / name).exists()))


# ---- all results below some folders ----------------------------------------------------------------------------------


def find_runs(places: Iterable[str | Path]) -> Found:
    """Find the finished runs in ``places`` (files or folders): ``result.json``, and other ``*.json`` with a result.

    Results that were replaced, such as ``result.old.json``, are left out unless they are themselves ``places``.
    Does not raise an exception for any contents of a file.
    """
    runs = Found()
    seen = set()
    for path in _files(places, runs.problems):
        try:
            status = (path if path.name != METRICS else path.parent).stat()
        except (OSError, ValueError) as error:
            runs.problems.append((path, f"cannot be read ({_reason(error)})"))
            continue
        if (status.st_dev, status.st_ino) not in seen:  # skip other names of the same file
            seen.add((status.st_dev, status.st_ino))
            _add(path, runs)
    return runs


def _files(places: Iterable[str | Path], problems: list[Problem]) -> Iterable[Path]:
    def unreadable(error: OSError) -> None:
        problems.append((error.filename, _reason(error)))

    for place in map(Path, places):
        if place.is_file():
            yield place
            continue
        entered: set[tuple[int, int]] = set()  # folders may be links, which may lead back
        for parent, folders, names in os.walk(place, onerror=unreadable, followlinks=True):
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in entered:
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            folders.sort()
            present = set(names)
            for name in sorted(present):
                if name.endswith(".json") and not name.startswith("result.old."):
                    yield Path(parent, name)
            if RESULT not in present and present & {METRICS, "log.txt"}:
                yield Path(parent, METRICS)  # which a run that has not ended a task lacks


def _add(path: Path, runs: Found) -> None:
    if path.name == METRICS:
        try:
            tasks = len(read_file(path).splitlines()) if path.exists() else 0  # a run in its first task lacks it
        except OSError as error:
            runs.problems.append((path, f"cannot be read ({_reason(error)})"))
            tasks = 0
        runs.unfinished.append((path.parent, f"{plural(tasks, 'task')} done"))
        return
    if path.suffix != ".json" or path.name == "config.json":
        return
    try:
        contents = _parsed(path)
        if path.name != RESULT and not (isinstance(contents, dict) and {"config", "curve"} & set(contents)):
            return  # another kind of file
        result, flaws = parse(contents, path)
    except UnusableRun as error:
        runs.problems.append((path, str(error).removeprefix(f"{path}: ")))
        return
    runs.problems += [(path, flaw) for flaw in flaws]
    analyses_path = path.with_name(ANALYSES)
    analyses, flaws = read_analyses(analyses_path) if path.name == RESULT else ([], [])
    runs.problems += [(analyses_path, flaw) for flaw in flaws]
    records = runs.language if isinstance(result, LanguageResult) else runs.records
    records.append(Record(result, path, analyses))


def _parsed(path: Path) -> Json:
    try:
        return json.loads(read_file(path))
    except OSError as error:
        raise UnusableRun(f"{path}: cannot be read ({_reason(error)}); make it readable") from None
    except (ValueError, RecursionError):
        raise UnusableRun(f"{path}: is not a complete result; delete it to run this again") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# ---- the analyses ----------------------------------------------------------------------------------------------------

Value = Annotated[float, Field(gt=-HUGE, lt=HUGE)]


class AnalysisLine(BaseModel):
    """The fields of a line of ``analyses.jsonl`` that readers rely on."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    task: Value
    share_new: Value
    gradients: dict[str, Json] = {}
    drift: dict[str, Json] = {}
    flatness: dict[str, Json] = {}
    dormant: dict[str, Json] = {}


def read_analyses(path: str | Path) -> tuple[list[dict[str, Json]], list[str]]:
    """The valid lines of an ``analyses.jsonl``, if it exists, and the problems of the others."""
    lines = []
    flaws = []
    try:
        text = read_file(path).decode(errors="replace") if Path(path).exists() else ""
    except OSError as error:
        return [], [f"cannot be read ({_reason(error)})"]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
            AnalysisLine.model_validate(value)
            lines.append(value)
        except ValidationError:
            lacking = "no task, or an analysis that is not as expected"
            flaws.append(f"line {number} is of another version ({lacking}); skipped")
        except (ValueError, RecursionError):
            flaws.append(f"line {number} is incomplete; skipped")
    return lines, flaws
