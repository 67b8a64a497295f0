"""The result of a run, declared once.

A run writes an :class:`ImageResult` or a :class:`LanguageResult`; whatever reads results reads these. A field without a
default must be there. One with a default may be missing or malformed, as in results of earlier versions or in files
that were edited: it is then left out. Fields that are not declared, such as registered metrics and a learner's costs,
are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from typing_extensions import NotRequired, TypedDict

from pycil_wsc.errors import UnusableRun, one_line
from pycil_wsc.files import Json
from pycil_wsc.results.identity import Identity
from pycil_wsc.results.old_schemas import completed

SCHEMA = 2  # increased when earlier versions would misread a result; schema 1 has no identity
HUGE = 1e18  # larger numbers are rejected


def _as_given(value: Any, check: Any) -> Any:
    """Check a value, but keep it as it was written: integers where a number is expected, and the order of keys."""
    check(value)
    return value


Real = Annotated[float, Field(gt=-HUGE, lt=HUGE)]
Number = Annotated[Real, WrapValidator(_as_given)]
Count = Annotated[int, Field(ge=0, lt=HUGE)]
Positive = Annotated[int, Field(ge=1, lt=HUGE)]
Share = Annotated[float, Field(ge=0, lt=1)]
Line = Annotated[list[Real], Field(min_length=1)]
Numbers = Annotated[Line, WrapValidator(_as_given)]
Lists = Annotated[list[Line], Field(min_length=1), WrapValidator(_as_given)]
Curves = Annotated[list[list[Real]], Field(min_length=1), WrapValidator(_as_given)]  # empty: learned without training

if TYPE_CHECKING:  # for type checkers, these are what they are in JSON
    ImageKeys = dict[str, Json]
    LanguageKeys = dict[str, Json]
    Fingerprint = dict[str, Json]
    Scores = dict[str, Json]
else:

    def keys(**declared: Any) -> Any:
        """A dict that has these keys, ``__`` for a dot, and may have others; kept as it was written."""
        kind = TypedDict("Keys", {name.replace("__", "."): value for name, value in declared.items()})
        kind.__pydantic_config__ = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
        return Annotated[kind, WrapValidator(_as_given)]

    # what readers rely on in a configuration; all of its other keys are recorded, too
    ImageKeys = keys(
        model_name=str,
        dataset=str,
        convnet_type=str,
        fixed_memory=bool,
        init_cls=Positive,
        increment=Positive,
        memory_per_class=Count,
        memory_size=Count,
        init_epoch=Count,
        epochs=Count,
        seed=Count,
        tasks=NotRequired[list[str] | None],
        max_tasks=NotRequired[Positive | None],
        validation_split=NotRequired[Share | None],
        exemplars=NotRequired[str | None],
        wsc__importance=NotRequired[str | None],
        wsc__reset=NotRequired[str | None],
        wsc__reset_every=NotRequired[str | int | None],
        wsc__average=NotRequired[bool | None],
        wsc__retain=NotRequired[Real | None],
    )
    LanguageKeys = keys(
        llm__method=str,
        llm__data=str,
        llm__model=str,
        llm__replay_ratio=Annotated[float, Field(ge=0, lt=HUGE)],
        seed=Count,
    )
    Fingerprint = keys(train=Positive)
    VersionScores = keys(matrix=Lists, last_average=Number, new_score=Number, forgetting=Number)
    Scores = keys(trace=VersionScores, fixed=VersionScores)


class Result(BaseModel):
    """What the results of all kinds of runs have."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    kind: str
    config: dict[str, Json]  # the keys that RECORDED names, with their values
    identity: Identity | None = None  # None only while a result of schema 1 is being read
    train_seconds: Number
    total_seconds: Number
    peak_memory_bytes: Number
    device: Json = None
    processes: Json = None
    precision: Json = None
    torch: Json = None
    commit: Json = None

    def contents(self) -> dict[str, Json]:
        """The contents of ``result.json``."""
        return self.model_dump(by_alias=True)


class ImageResult(Result):
    """The result of class-incremental learning. Accuracies are in percent, times in seconds.

    ``curve``: accuracy on all classes seen, after each task. ``matrix``: row t has the accuracies on tasks 0..t after
    task t. ``confusion``: (classes, classes) test images by true class and prediction, in learning order.
    ``expands``: whether the method's network grows with the tasks, or doubles.
    ``train_seconds_spent`` excludes a first task that another run had trained.
    """

    kind: str = "class_incremental"
    config: ImageKeys
    tested_on: Json = "test"
    curve: Numbers
    avg_acc: Number
    last_acc: Number
    matrix: Lists
    forgetting: Number
    new_acc: Number
    top5_curve: Numbers | None = None
    nme_curve: Numbers | None = None
    task_known_curve: Numbers | None = None
    task_known_matrix: Lists | None = None
    new_known_curve: Numbers | None = None
    class_accuracies: Numbers | None = None
    weakest_tenth: Number | None = None
    anytime_curve: Lists | None = None
    anytime_auc: Number | None = None
    train_loss: Curves | None = None
    train_accuracy: Json = None
    confusion: Lists | None = None
    expands: bool | None = None
    train_seconds_spent: Number | None = None
    images_trained: Number
    train_flops: Json = None
    importance_seconds: Number | None = None
    importance_bytes: Number | None = None
    importance_passes: Number | None = None
    parameters: Number | None = None
    held_bytes: Number | None = None
    held: Json = None  # the parts of ``held_bytes``
    data: Fingerprint | None = None  # numbers of samples and a hash
    class_order: list[int] | None = None
    class_names: list[str] | None = None

    @pydantic.field_validator("matrix")
    @classmethod
    def _is_lower_triangle(cls, rows: list[list[float]], info: pydantic.ValidationInfo) -> list[list[float]]:
        _check_triangle(rows, len(info.data.get("curve", rows)))
        return rows

    @pydantic.field_validator(
        "top5_curve", "nme_curve", "task_known_curve", "task_known_matrix", "new_known_curve", "train_loss"
    )
    @classmethod
    def _is_one_per_task(cls, values: list[Json] | None, info: pydantic.ValidationInfo) -> list[Json] | None:
        if values is not None and len(values) != len(info.data.get("curve", values)):
            raise ValueError("one value per task is needed")
        return values

    @pydantic.field_validator("confusion")
    @classmethod
    def _is_square(cls, rows: list[list[float]] | None) -> list[list[float]] | None:
        if rows is not None and {len(row) for row in rows} != {len(rows)}:
            raise ValueError("a square is needed")
        return rows


class LanguageResult(Result):
    """The result of continual instruction tuning. Scores are shares, 0..1.

    ``scores``: by the published metrics (``trace``) and by corrected ones (``fixed``). ``trivial``: scores of answers
    without a model, by version of the metrics, task and kind of answer.
    """

    kind: str = "llm"
    config: LanguageKeys
    data: Json = None
    tasks: list[str]
    metrics: Json = None
    avg_score: Number
    scores: Scores
    chat_template: Json = None
    trivial: Annotated[dict[str, dict[str, dict[str, Real]]], WrapValidator(_as_given)] | None = None
    warnings: list[str] | None = None
    train_minutes: Number
    models_resident: Number
    models_resident_streamed: Number
    relative_vram_minutes: Number
    relative_vram_minutes_streamed: Number
    tokens_trained: Number
    padding: Number
    tokens_per_second: Number
    sharded: Json = None
    transformers: Json = None
    train_seconds: Number = 0.0
    total_seconds: Number = 0.0

    @pydantic.field_validator("scores")
    @classmethod
    def _has_all_tasks(cls, scores: Mapping[str, Json], info: pydantic.ValidationInfo) -> Mapping[str, Json]:
        for version in ("trace", "fixed"):
            _check_triangle(scores[version]["matrix"], len(info.data.get("tasks", scores[version]["matrix"])))
        return scores


def _check_triangle(rows: list[list[float]], tasks: int) -> None:
    if [len(row) for row in rows] != list(range(1, tasks + 1)):
        raise ValueError("row t must have t + 1 values")


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_language_model(contents: Json) -> bool:
    """Whether these are the contents of a language model's ``result.json``."""
    return isinstance(contents, dict) and contents.get("kind") == "llm"


def parse(contents: Json, path: Path | str = "result.json") -> tuple[Result, list[str]]:
    """The result with these contents, and a line for each malformed field that was left out.

    Results of earlier versions are completed. Raises :class:`UnusableRun`, naming ``path``, if the result cannot be
    used.
    """
    if not isinstance(contents, dict) or not isinstance(contents.get("config"), dict):
        raise UnusableRun(f"{path}: is not a complete result; delete it to run this again")
    schema = contents.get("schema", 1)
    if type(schema) is not int or schema not in range(1, SCHEMA + 1):
        raise UnusableRun(
            f"{path}: is a result of another version (schema {one_line(str(schema))}, supported: 1 to {SCHEMA}); "
            "update pycil_wsc"
        )
    declaration = LanguageResult if is_language_model(contents) else ImageResult
    try:
        result = declaration.model_validate(contents)
        malformed = []
    except ValidationError as error:
        malformed = _malformed(declaration, error, contents, path)
        kept = {name: value for name, value in contents.items() if name not in malformed}
        result = declaration.model_validate(kept)
    if schema > 1 and result.identity is None:
        raise _of_another_version(path, "identity", "missing")
    result = result.model_copy(update=completed(result.contents(), result.identity))
    return result, [f"'{name}' is not as expected; left out" for name in malformed]


def _malformed(
    declaration: type[Result], error: ValidationError, contents: Mapping[str, Json], path: Path | str
) -> list[str]:
    """The malformed fields that may be left out, in the file's order; raises ``UnusableRun`` for any other."""
    names = set()
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name, *inner = map(str, problem["loc"])
        required = declaration.model_fields[name].is_required()
        if required or name in ("kind", "identity", "schema"):
            where = ".".join((name, *inner[:1])) if name == "config" else name
            raise _of_another_version(path, where, "missing" if problem["type"] == "missing" else "not as expected")
        names.add(name)
    return [name for name in contents if name in names]


def _of_another_version(path: Path | str, name: str, state: str) -> UnusableRun:
    return UnusableRun(f"{path}: is a result of another version ('{name}' is {state}); move it away to run this again")


def undeclared_measures(contents: Mapping[str, Json]) -> dict[str, float]:
    """Numbers that an image run recorded beside the declared fields, and means of lists of them.

    They are registered metrics, and records of a method.
    """
    measures = {}
    for name in sorted(contents.keys() - ImageResult.model_fields.keys() - {"schema"}):
        value = contents[name]
        if name and is_measure(value):
            measures[name] = fmean(value) if isinstance(value, list) else value
    return measures


def is_measure(value: Json) -> bool:
    """Whether a value of a result is a number, or a list of numbers."""
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(type(number) in (int, float) and abs(number) < HUGE for number in numbers)
