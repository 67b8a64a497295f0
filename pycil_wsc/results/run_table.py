"""The finished runs of a study as one CSV table, a row per run: what pages and tests read, and what a repository keeps.

The columns: the run's folder, its method, label, memory and seed; the keys in which the runs differ; what was measured
after each task (``BY_TASK``); measures of the whole run; its costs, and where it ran. A cell is empty if the run has no
such value.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pycil_wsc.config.image_config import INCIDENTAL
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json, absolute, locked, read_file, write_atomically
from pycil_wsc.results.identity import NAMED
from pycil_wsc.results.schema import undeclared_measures
from pycil_wsc.results.store import RESULT, Problem, Record, find_runs

Row = dict[str, Any]
Lines = list[dict[str, Json]]  # the records of an analysis, a dict per task
FOLDER = "run"  # the column that identifies a run
DIGITS = 4  # significant digits of a number
FINER: dict[str, int] = dict.fromkeys(  # and of those that pages subtract and show with two decimals
    (
        "average",
        "newest",
        "forgetting",
        "anytime_auc",
        "weakest_tenth",
        "train_loss",
        "train_flops",
        "gradient_cosine",
        "gradient_norm",
        "drift",
    ),
    7,
)
LARGE = 1e9  # from here on, numbers have an exponent
TEXTS = {FOLDER, "method", "label", "device", "precision", "torch", "commit"}  # never numbers
LANGUAGE = "a language model's run has no accuracies of classes; its result.json is the record"


def finished(sweeps: Iterable[Path]) -> tuple[list[tuple[str, Record]], list[Problem]]:
    """The finished image runs in the folders of sweeps, with their own folders below them, and what was unreadable.

    Raises a :class:`UserError` if there is none.
    """
    runs: list[tuple[str, Record]] = []
    problems: list[Problem] = []
    for sweep in sweeps:
        in_sweep = find_runs([sweep])
        for record in in_sweep.records:
            if record.path is not None and record.path.name == RESULT:
                runs.append((record.path.parent.relative_to(sweep).as_posix(), record))
        problems += in_sweep.problems
        problems += [(record.path, LANGUAGE) for record in in_sweep.language]
    if not runs:
        named = ", ".join(map(str, sweeps))
        raise UserError(f"{named}: no finished run of image classification; give the folders of sweeps, runs/<prefix>")
    return runs, problems


def add(runs: Sequence[tuple[str, Record]], path: Path) -> int:
    """Write the runs into the table ``path``, beside the other runs that it has; returns how many it has then."""
    path = absolute(path)
    with locked(path.parent):
        rows = {row[FOLDER]: row for row in (read(path) if path.exists() else [])}
        for row in rows_of(runs):
            rows[row[FOLDER]] = row
        ordered = sorted(rows.values(), key=lambda row: [row["method"], row["memory"], row["seed"], row[FOLDER]])
        write_atomically(path, _text(ordered))
    return len(ordered)


def read(path: Path) -> list[Row]:
    """The rows of a table, each with the columns that it has a value for."""
    try:
        text = read_file(path).decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); give a table of runs") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a table of runs; give another file") from None
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    if lines and not {FOLDER, "method", "memory", "seed"} <= lines[0].keys():
        raise UserError(f"{path}: is not a table of runs; give another file")
    return [{name: _value(name, cell) for name, cell in line.items() if cell} for line in lines]


def _text(rows: Sequence[Row]) -> str:
    """The table, with the columns in the order of :func:`_row`."""
    columns = sorted({name for row in rows for name in row}, key=_place)
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({name: _cell(name, value) for name, value in row.items()})
    return text.getvalue()


NAMES = (FOLDER, "method", "label", "memory", "seed")
BY_TASK = {
    "accuracy": "on all classes seen",
    "newest": "on the newest task's images, among all classes",
    "among_newest": "on the newest task's images, among its classes",
    "trained": "of the last epoch's training steps",
    "fitted": "on the training images after training (the analysis training_accuracy)",
}


def _place(column: str) -> tuple[int, int, int, str]:
    """Where a column stands: names, keys, values of each task, measures and costs."""
    if column in NAMES:
        return 0, NAMES.index(column), 0, ""
    if column in MEASURES:
        return 3, MEASURES.index(column), 0, ""
    measure, _, task = column.rpartition("_")
    if measure in BY_TASK and task.isdecimal():
        return 2, list(BY_TASK).index(measure), int(task), ""
    if column in COSTS:
        return 4, COSTS.index(column), 0, ""
    return 1, 0, 0, column


def rows_of(runs: Sequence[tuple[str, Record]]) -> list[Row]:
    """The rows of runs, with all digits; a value that a run lacks is None or missing."""
    varied = _varied([record.config for _, record in runs])
    return [{FOLDER: folder} | _row(record, varied) for folder, record in runs]


def _varied(configs: Sequence[Mapping[str, Json]]) -> list[str]:
    """The keys that decide a result and have different values in these runs."""
    names = dict.fromkeys(name for config in configs for name in config)
    varied = []
    for name in names:
        values = {json.dumps(config[name]) for config in configs if name in config}
        if len(values) > 1 and name not in INCIDENTAL and name not in NAMED:
            varied.append(name)
    return varied


def _row(record: Record, varied: Sequence[str]) -> Row:
    data = record.data
    label = record.config.get("label")
    row: Row = {"method": record.method, "label": label, "memory": record.memory, "seed": record.seed}
    row |= {name: record.config.get(name) for name in varied}
    by_task = {
        "accuracy": record.curve,
        "newest": [accuracies[-1] for accuracies in data["matrix"]],
        "among_newest": data.get("new_known_curve") or [],
        "trained": [epochs[-1] if epochs else None for epochs in data.get("train_accuracy") or []],
        "fitted": [line["all"] for line in record.analysed("training_accuracy")],
    }
    for measure, values in by_task.items():
        row |= {f"{measure}_{task}": value for task, value in enumerate(values, 1)}
    measures = zip(MEASURES, _measures(record), strict=True)
    costs = zip(COSTS, _costs(record), strict=True)
    return row | dict(measures) | dict(costs) | undeclared_measures(data)


MEASURES = (
    "average",
    "newest",
    "forgetting",
    "train_loss",
    "train_accuracy",
    "gradient_cosine",
    "gradient_norm",
    "drift",
    "anytime_auc",
    "weakest_tenth",
)


def _measures(record: Record) -> Sequence[float | None]:
    """Those of training and of the analyses are means over all tasks but the first, at a task's last epoch."""
    data = record.data
    losses = [epochs[-1] for epochs in (data.get("train_loss") or [])[1:] if epochs]
    trained = [epochs[-1] for epochs in (data.get("train_accuracy") or [])[1:] if epochs]
    gradients = alignment(record)
    return (
        record.average,
        data["new_acc"],
        data["forgetting"],
        _mean(losses),
        _mean(trained),
        _mean([line["cosine"] for line in gradients]),
        _mean([line["norm"] for line in gradients]),
        _mean([line["norm"] for line in drift(record)]),
        data.get("anytime_auc"),
        data.get("weakest_tenth"),
    )


def alignment(record: Record) -> Lines:
    """The gradients at the start of each task with past data."""
    lines = record.analysed("gradients")
    return [line for line in lines if line["cosine"] is not None and line["norm"] is not None and line["norm_new"]]


def drift(record: Record) -> Lines:
    """The drift between tasks from the second task on."""
    return [line["between"] for line in record.analysed("drift") if line["between"]]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


COSTS = (
    "train_flops",
    "images_trained",
    "train_seconds",
    "seconds",
    "peak_memory_bytes",
    "parameters",
    "device",
    "precision",
    "torch",
    "commit",
)


def _costs(record: Record) -> Sequence[Json]:
    data = record.data
    spent = data.get("train_seconds_spent")
    taken_over = 0 if spent is None else data["train_seconds"] - spent  # of a first task that another run had trained
    return (
        data.get("train_flops"),
        data["images_trained"],
        data["train_seconds"],
        data["total_seconds"] - taken_over,
        data["peak_memory_bytes"],
        data["parameters"],
        data["device"],
        data["precision"],
        data["torch"],
        _shortened(data["commit"]),
    )


def _shortened(commit: str | None) -> str | None:
    """Seven digits of a commit, and whether files differed from it."""
    if commit is None:
        return None
    digits, dash, state = commit.partition("-")
    return digits[:7] + dash + state


def _cell(name: str, value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return json.dumps(value, separators=(",", ":"))
    rounded = f"{value:.{FINER.get(name, DIGITS)}g}"
    if isinstance(value, int) and abs(value) < LARGE:
        return str(value) if name in NAMES else str(round(float(rounded)))
    return rounded


def _value(name: str, cell: str) -> Any:
    if name in TEXTS:
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell
