"""The model card of an exported learner: Markdown below YAML, as the Hugging Face Hub reads it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycil_wsc.classifier.predict.answers import Tested
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError, one_line, plural
from pycil_wsc.files import read_file

Matrix = list[list[float | None]]
LICENCE = "# license: for the owner to choose; the next export keeps it\n"
TEXT = """---
library_name: pycil_wsc
pipeline_tag: image-classification
tags:
- image-classification
- continual-learning
- class-incremental-learning
- {tag}
{licence}---

# {title}

A classifier of {classes} classes that learned them in {tasks}, with the method `{method}` of pycil_wsc {version}.

## Use

```python
import pycil_wsc

model = pycil_wsc.load_exported(".")  # this folder
names = model.predict(["a.jpg", "b.jpg"])
```

It takes image files, PIL images and uint8 arrays. `model.safetensors` has the weights, `config.json` the classes and
what is done to an image before. MLflow loads the folder too: `mlflow.pyfunc.load_model(".")`.

## What it learned

{learned}

The fingerprint is that of the images, labels and names of a task; of image files, it covers names and sizes.

## Memory

{memory} They are not in this folder.

## Accuracy

{accuracy}

## Training

Backbone `{backbone}`, images of side {side}, learned in {seconds:.0f} seconds. `config.json` has every setting.

## Licence

`license` in the first lines of this file. If there is none, the owner has not chosen one yet.
"""


class Told(NamedTuple):
    """What a card tells beside the classes and their tasks."""

    method: str
    backbone: str
    version: str
    seconds: float  # what its tasks took


def card(path: Path, held: Dataset, told: Told, matrix: Matrix | None) -> str:
    """The card for ``path``, which keeps the licence of a card that is there. ``held``: the learner's exemplars."""
    assert held.arrivals is not None
    seen = held.arrivals.seen
    return TEXT.format(
        tag=json.dumps(told.method),
        licence=licence_of(path) or LICENCE,
        title=shown(path.absolute().parent.name),
        classes=seen[-1],
        tasks=plural(len(seen), "task"),
        method=told.method,
        version=told.version,
        learned=learned_table(held),
        memory=memory_line(held),
        accuracy=accuracy_table(matrix),
        backbone=told.backbone,
        side=held.info.image_size,
        seconds=told.seconds,
    )


def licence_of(path: Path) -> str:
    """The lines that the owner has given the card in ``path`` about the licence; "" if there are none."""
    try:
        text = read_file(path).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return ""
    head = re.match(r"---\n(.*?)^---$", text, re.DOTALL | re.MULTILINE)
    lines = head[1].splitlines() if head else []
    return "".join(f"{line}\n" for line in lines if re.match(r"license(_name|_link)?: *\S", line))


def learned_table(held: Dataset) -> str:
    """A row for each task: its new classes, and its data."""
    assert held.arrivals is not None
    tasks = (held.fingerprint or {}).get("tasks", [])
    lines = ["| task | new classes | images | fingerprint |", "|---|---|---|---|"]
    start = 0
    for number, end in enumerate(held.arrivals.seen):
        names = ", ".join(map(shown, held.info.classes[start:end])) or "none"
        data = tasks[number] if number < len(tasks) else {"train": "", "sha256": ""}
        lines.append(f"| {number + 1} | {names} | {data['train']} | {data['sha256']} |")
        start = end
    return "\n".join(lines)


def memory_line(held: Dataset) -> str:
    counts = np.bincount(held.train.targets, minlength=held.info.num_classes)
    kind = "as pixels" if held.train.in_memory else "by the names of their files"
    range_of = f"{counts.min()} to {counts.max()}" if counts.min() < counts.max() else f"{counts.max()}"
    return f"The learner keeps {len(held.train)} exemplars, {range_of} of each class, {kind}."


def accuracy_table(matrix: Matrix | None) -> str:
    if matrix is None:
        return "Not measured: `export(folder, evaluations=...)` takes what `evaluate` returned after each task."
    numbers = range(1, len(matrix) + 1)
    lines = [
        "Top-1 accuracy in percent after each task, on test images of the classes that each task brought: the mean of "
        "the classes' accuracies.",
        "",
        f"| after task | {' | '.join(f'classes of task {number}' for number in numbers)} |",
        f"|---|{'---|' * len(matrix)}",
    ]
    for number, row in zip(numbers, matrix):
        cells = ["" if value is None else f"{value:.1f}" for value in row] + [""] * (len(matrix) - len(row))
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_matrix(evaluations: Sequence[Tested | None], classes: Sequence[str], seen: Sequence[int]) -> Matrix:
    """Row t: after task t, the accuracy on the classes that each task up to t brought; None where it was not measured.

    Args:
        evaluations: what ``Learner.evaluate`` returned after each task, None for a task that was not tested.
        classes: all classes, in learning order.
        seen: the number of classes after each task.

    Raises:
        UserError: if there is not one evaluation for each task, or one is of other classes.
    """
    if not isinstance(evaluations, (list, tuple)) or len(evaluations) != len(seen):
        given = len(evaluations) if isinstance(evaluations, (list, tuple)) else f"a {type(evaluations).__name__}"
        raise UserError(f"evaluations: {given}; give a list with one for each of the {len(seen)} tasks")
    return [_row(number, evaluation, classes, seen) for number, evaluation in enumerate(evaluations)]


def _row(number: int, evaluation: object, classes: Sequence[str], seen: Sequence[int]) -> list[float | None]:
    """The row of the matrix after task ``number``, counted from 0."""
    by_class = {} if evaluation is None else evaluation.get("classes") if isinstance(evaluation, Mapping) else None
    if not isinstance(by_class, Mapping):
        raise UserError(f"evaluations: item {number + 1} is not what evaluate returns; give that, or None")
    if later := by_class.keys() - set(classes[: seen[number]]):
        raise UserError(f"evaluations: item {number + 1} has '{min(map(str, later))}', which was not learned by then")
    for name, value in by_class.items():
        if not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise UserError(f"evaluations: item {number + 1} has no accuracy of '{name}' in percent, but {value!r}")
    row: list[float | None] = []
    for start, end in zip([0, *seen], seen[: number + 1]):
        measured = [by_class[name] for name in classes[start:end] if name in by_class]
        row.append(float(np.mean(measured)) if measured else None)
    return row


def shown(name: str) -> str:
    """A name as text of Markdown: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(one_line(name), quote=False))
