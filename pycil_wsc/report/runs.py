"""The runs below a folder: found, read and checked. What cannot be used is reported by name and left as it is."""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pycil_wsc.errors import UnusableRun
from pycil_wsc.report.measures import checked, of_a_language_model

HUGE = 1e18  # numbers beyond this are neither counts nor measurements


class Setting(NamedTuple):
    """What runs must share to stand in one table. ``fixed_memory``: memory is counted per class, otherwise in all."""

    dataset: str
    init_cls: int
    increment: int
    convnet_type: str
    fixed_memory: bool
    validation_split: float = 0.0  # the share of the training data that was tested on in place of the test set


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run: the contents of its ``result.json``, where that stands, and what else was recorded."""

    data: dict
    path: Path | None = None
    analyses: list = field(default_factory=list)  # what ``analyse`` recorded: a dict per task

    @property
    def config(self):
        return self.data["config"]

    @cached_property
    def method(self):
        consolidated = self.config.get("consolidate") and self.config["model_name"] != "wsc"
        return self.config["model_name"] + ("+wsc" if consolidated else "")

    @cached_property
    def memory(self):
        """Exemplars: per class where the memory is fixed, else in all."""
        return self.config["memory_per_class" if self.config["fixed_memory"] else "memory_size"]

    @cached_property
    def setting(self):
        return Setting(*(self.config[name] for name in Setting._fields[:-1]), self.config.get("validation_split", 0.0))


@dataclass
class Found:
    """What lies below some folders: finished runs, files that cannot be used and why, and runs that have not ended."""

    records: list = field(default_factory=list)
    language: list = field(default_factory=list)  # finished runs of language models
    problems: list = field(default_factory=list)  # (path, what is wrong)
    unfinished: list = field(default_factory=list)  # (folder, what is there)


def find_runs(folders):
    """The finished runs below ``folders``: every ``result.json``, and other ``*.json`` that hold a result. Raises for no file's contents."""
    found, seen = Found(), set()
    for folder in map(Path, folders):
        if folder.is_file():
            _take(folder, found)
        for parent, _, names in sorted(
            os.walk(folder, onerror=lambda error: found.problems.append((error.filename, error.strerror)))
        ):
            for path in (Path(parent, name) for name in sorted(names)):
                real = os.path.realpath(path)  # a loop of links is no error here
                if real not in seen:
                    seen.add(real)
                    _take(path, found)
    return found


def _take(path, found):
    if path.name == "metrics.jsonl":
        lines, flaws = read_metrics(path)
        found.problems += [(path, flaw) for flaw in flaws]
        if not (path.parent / "result.json").exists():
            found.unfinished.append((path.parent, f"{len(lines)} task{'s' * (len(lines) != 1)} done"))
    elif path.suffix == ".json" and path.name != "config.json":
        try:
            data = _parsed(path)
            if path.name != "result.json" and not (isinstance(data, dict) and {"config", "curve"} & set(data)):
                return  # another kind of file
            data, flaws = _checked(path, data)
        except UnusableRun as error:
            found.problems.append((path, str(error).removeprefix(f"{path}: ")))
        else:
            found.problems += [(path, flaw) for flaw in flaws]
            analyses, flaws = (
                read_analyses(path.with_name("analyses.jsonl")) if path.name == "result.json" else ([], [])
            )
            found.problems += [(path.with_name("analyses.jsonl"), flaw) for flaw in flaws]
            (found.language if of_a_language_model(data) else found.records).append(Record(data, path, analyses))


def read_result(path):
    """The contents of a ``result.json``; ``UnusableRun`` names a file that is not whole or is of another version."""
    return _checked(path, _parsed(path))[0]


def read_metrics(path):
    """The whole lines of a ``metrics.jsonl`` (dicts), and what is wrong with the others."""
    return _read_lines(
        path, lambda line: _is_number(line.get("cnn_top1")) or _is_series(line.get("trace")), "no task or cnn_top1"
    )


def read_analyses(path):
    """The whole lines of an ``analyses.jsonl``, if there is one, and what is wrong with the others."""
    if not path.exists():
        return [], []
    return _read_lines(
        path,
        lambda line: (
            _is_number(line.get("share_new"))
            and all(fits(line[name]) for name, fits in ANALYSES.items() if name in line)
        ),
        "no task, or an analysis that is not as expected",
    )


def _read_lines(path, fits, lacking):
    lines, flaws = [], []
    try:
        text = Path(path).read_bytes().decode(errors="replace")
    except OSError as error:
        return lines, [f"cannot be read ({error.strerror})"]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            flaws.append(f"line {number} is not whole; skipped")
            continue
        if isinstance(value, dict) and _is_number(value.get("task")) and fits(value):
            lines.append(value)
        else:
            flaws.append(f"line {number} is of another version ({lacking}); skipped")
    return lines, flaws


def _parsed(path):
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UnusableRun(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError):
        raise UnusableRun(f"{path}: is not a whole result; delete it to run this again") from None


def _checked(path, data):
    """``data`` without the optional values that are malformed, and what is wrong with those."""
    if of_a_language_model(data):
        return checked(path, data), []
    config = data.get("config") if isinstance(data, dict) else None
    if not isinstance(config, dict):
        raise UnusableRun(f"{path}: is not a whole result; delete it to run this again")
    wrong = [f"config.{name}" for name, fits in CONFIG.items() if not fits(config.get(name))]
    wrong += [f"config.{name}" for name, fits in STUDIED.items() if name in config and not fits(config[name])]
    wrong = wrong or next(
        ([name] for name, fits in REQUIRED.items() if not fits(data.get(name), data)), []
    )  # "curve" first: others are as long
    if wrong:
        present = wrong[0] in data or wrong[0].removeprefix("config.") in config
        raise UnusableRun(
            f"{path}: is a result of another version ('{wrong[0]}' is {'not as expected' if present else 'lacking'}); move it away to run this again"
        )
    spoilt = [name for name, fits in OPTIONAL.items() if data.get(name) is not None and not fits(data[name], data)]
    return {name: value for name, value in data.items() if name not in spoilt}, [
        f"'{name}' is not as expected; left out" for name in spoilt
    ]


def _is_text(value):
    return isinstance(value, str)


def _is_flag(value):
    return isinstance(value, bool)


def _is_count(value):
    return type(value) is int and 0 <= value < HUGE


def _is_positive(value):
    return _is_count(value) and value > 0


def _is_number(value, _=None):
    return type(value) in (int, float) and abs(value) < HUGE


def _is_series(value, _=None):
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_curve(value, data):
    return _is_series(value) and len(value) == len(data["curve"])


def _is_matrix(value, data):
    """Lower triangular: the accuracy on tasks 0..t after task t."""
    return (
        isinstance(value, list)
        and len(value) == len(data["curve"])
        and all(_is_series(row) and len(row) == t + 1 for t, row in enumerate(value))
    )


def _is_loss(value, data):
    return isinstance(value, list) and len(value) == len(data["curve"]) and all(map(_is_series, value))


def _is_confusion(value, _):
    return (
        isinstance(value, list)
        and bool(value)
        and all(_is_series(row) and len(row) == len(value) and min(row) >= 0 for row in value)
    )


def _is_names(value, _):
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_numbers(value, names):
    return isinstance(value, dict) and all(value.get(name) is None or _is_number(value[name]) for name in names)


def _is_drift(value):
    between, within = (value.get(name) for name in ("between", "within")) if isinstance(value, dict) else (None, None)
    layers = (
        between is None
        or isinstance(between, dict)
        and _is_number(between.get("norm"))
        and isinstance(between.get("relative"), dict)
        and _are_numbers(between["relative"], between["relative"])
    )
    return layers and isinstance(within, dict) and _is_series(within.get("norm"))


def _is_flatness(value):
    """Losses that were no finite numbers are None."""
    if (
        not isinstance(value, dict)
        or not _is_series(value.get("distance"))
        or not isinstance(value.get("loss"), list)
        or not value["loss"]
    ):
        return False
    return all(
        isinstance(line, list)
        and len(line) == len(value["distance"])
        and all(loss is None or _is_number(loss) for loss in line)
        for line in value["loss"]
    )


CONFIG = {
    "model_name": _is_text,
    "dataset": _is_text,
    "convnet_type": _is_text,
    "fixed_memory": _is_flag,
    "init_cls": _is_positive,
    "increment": _is_positive,
    "memory_per_class": _is_count,
    "memory_size": _is_count,
    "init_epoch": _is_count,
    "epochs": _is_count,
    "seed": _is_count,
}
STUDIED = {
    "wsc.importance": _is_text,
    "wsc.reset": _is_text,
    "wsc.reset_every": lambda value: _is_text(value) or _is_count(value),
    "wsc.average": _is_flag,
    "wsc.retain": _is_number,
    "exemplars": _is_text,
    "consolidate": _is_flag,
    "validation_split": _is_number,
}
REQUIRED = {
    "curve": _is_series,
    "avg_acc": _is_number,
    "last_acc": _is_number,
    "matrix": _is_matrix,
    "forgetting": _is_number,
    "new_acc": _is_number,
    "train_seconds": _is_number,
    "total_seconds": _is_number,
    "images_trained": _is_number,
    "peak_memory_bytes": _is_number,
}
OPTIONAL = {
    "top5_curve": _is_curve,
    "nme_curve": _is_curve,
    "train_loss": _is_loss,
    "confusion": _is_confusion,
    "class_names": _is_names,
    "train_seconds_spent": _is_number,
    "importance_seconds": _is_number,
    "importance_bytes": _is_number,
    "importance_passes": _is_number,
    "parameters": _is_number,
    "class_order": _is_series,
}
ANALYSES = {
    "gradients": lambda value: _are_numbers(value, ("cosine", "norm_new", "norm_past", "norm")),
    "drift": _is_drift,
    "flatness": _is_flatness,
    "dormant": lambda value: _are_numbers(value, ("share",)),
}
