"""A learner's state after classes were left out or merged: what it has of each class follows.

A head has a row for each class, and a teacher or an auxiliary head one for some of them. Which parts these are is not
declared: networks that have grown to one class more tell it by their shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.classifier.predict.rebuild import Reached, grown
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.types import DatasetInfo
from pycil_wsc.errors import UserError
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner_state import stored_of, tensors_of, with_parts, without_memory

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Regrouping:
    """Which classes there are afterwards.

    Args:
        groups: for each class afterwards the classes that it was, by number, ascending. Classes are in the order of
            the first of each group.
        names: what each is called.
        seen: the number of classes after each task, before.
    """

    groups: Sequence[Sequence[int]]
    names: tuple[str, ...]
    seen: tuple[int, ...]

    @property
    def numbers(self) -> np.ndarray:
        """The number that each class has afterwards, -1 if it is left out: int64 (classes before,)."""
        numbers = np.full(self.seen[-1], -1, np.int64)
        for new, group in enumerate(self.groups):
            numbers[list(group)] = new
        return numbers

    @property
    def seen_afterwards(self) -> tuple[int, ...]:
        """The number of classes after each task, afterwards. The first task has at least one, if of a later task."""
        firsts = np.array([group[0] for group in self.groups])
        return tuple(max(1, int((firsts < number).sum())) for number in self.seen)


class Axis(NamedTuple):
    """A dimension of a tensor that grows with the classes from ``start`` to ``stop``, ``width`` rows for each.

    There are ``offset`` other rows before them, such as one for each earlier task.
    """

    dim: int
    start: int
    stop: int
    width: int
    offset: int


def regrouped_state(state: State, config: Config, info: DatasetInfo, regrouping: Regrouping, mean: bool) -> State:
    """The ``state_dict()`` of a learner whose classes are now those of ``regrouping``, but for its exemplars.

    Args:
        state: of the learner before.
        config: its configuration.
        info: its classes, before.
        regrouping: the classes afterwards.
        mean: whether a merged class has the mean of the rows of its classes; otherwise it has those of the first one.

    Raises:
        UserError: if a part of the network belongs to several classes at once.
    """
    groups = regrouping.groups
    axes = axes_of_classes(config, info, regrouping.seen)
    changed = {name: _regrouped(value, axes.get(name, ()), groups, mean) for name, value in tensors_of(state).items()}
    others = _others(without_memory(state), axes, groups, mean)
    stored = stored_of(state)
    plan = configured_learner(config).Plan(config)
    if plan.stored_bytes(1) != plan.stored_bytes(2):  # numbers of each class, such as logits
        stored = {name: {**table, "values": _columns(table["values"], groups)} for name, table in stored.items()}
    return with_parts({**state, **changed}, stored=stored, **others)


def axes_of_classes(config: Config, info: DatasetInfo, seen: Sequence[int]) -> dict[str, list[Axis]]:
    """The axes of each tensor of a learner's ``state_dict()`` that has some, from its shapes with one class more."""
    tasks = sorted({0, max(0, len(seen) - 2), len(seen) - 1})  # a teacher knows those before the last one
    bounds = [0, *(seen[task - 1] for task in tasks[1:]), seen[-1]]  # of the classes that each stands for
    shapes = _shapes(config, info, seen)
    larger = []
    for task in tasks:
        one_more = [*seen[:task], *(number + 1 for number in seen[task:])]
        larger.append(_shapes(config, info, one_more))
    axes: dict[str, list[Axis]] = {}
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            growth = [shapes_of[name][dim] - size for shapes_of in larger]
            width = max(growth, key=abs)
            if not width:
                continue
            parts = [number for number, rows in enumerate(growth) if rows]
            start, stop = bounds[parts[0]], bounds[parts[-1] + 1]
            offset = size - width * (stop - start)
            is_linear = set(growth[parts[0] : parts[-1] + 1]) == {width} and width > 0
            if not is_linear or not 0 <= offset <= len(seen):
                raise UserError(
                    f"'{config.method}' has parts that belong to several classes at once ({name}), so none can be "
                    "removed or merged; rename it, or start a new learner"
                )
            axes.setdefault(name, []).append(Axis(dim, start, stop, width, offset))
    return axes


def _shapes(config: Config, info: DatasetInfo, seen: Sequence[int]) -> Shapes:
    state = _grown(config, info, seen).state_dict()
    return {name: tuple(value.shape) for name, value in tensors_of(state).items()}


def _grown(config, info, seen):
    names = tuple(map(str, range(seen[-1])))
    config = dataclasses.replace(config, device="cpu")
    return grown(config, dataclasses.replace(info, classes=names), Reached.of_stream(seen))


def _others(parts: State, axes: Mapping[str, Sequence[Axis]], groups: Sequence[Sequence[int]], mean: bool) -> State:
    """What a method keeps beside its networks: tensors under the names of the network's own."""
    changed = {}
    for name, value in parts.items():
        if isinstance(value, dict):
            tensors = dict(value)
            for key, tensor in tensors.items():
                if torch.is_tensor(tensor):
                    tensors[key] = _regrouped(tensor, axes.get(f"network.{key}", ()), groups, mean)
            value = tensors
        changed[name] = value
    return changed


def _regrouped(tensor: Tensor, axes: Sequence[Axis], groups: Sequence[Sequence[int]], mean: bool) -> Tensor:
    """``tensor`` with the rows of each group of classes along its ``axes``."""
    for axis in axes:
        if tensor.shape[axis.dim] != axis.offset + axis.width * (axis.stop - axis.start):
            continue  # it is not there yet, such as the sums of no image
        parts = [tensor.narrow(axis.dim, 0, axis.offset)]
        for group in groups:
            if not axis.start <= group[0] < axis.stop:
                continue
            rows = [_rows_of(tensor, axis, label) for label in group if label < axis.stop]
            parts.append(torch.stack(rows).mean(0) if mean and tensor.is_floating_point() else rows[0])
        tensor = torch.cat(parts, axis.dim)
    return tensor


def _rows_of(tensor: Tensor, axis: Axis, label: int) -> Tensor:
    """The rows of a class: a view."""
    return tensor.narrow(axis.dim, axis.offset + axis.width * (label - axis.start), axis.width)


def _columns(values: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Values of each class (n, classes), nan for later classes than they know, regrouped: means over each group.

    Single numbers, (n,), are not of classes, and stay.
    """
    if values.dim() == 1:
        return values
    missing = max(0, max(group[-1] for group in groups) + 1 - values.shape[1])
    padded = torch.nn.functional.pad(values, (0, missing), value=torch.nan)
    return torch.stack([padded[:, list(group)].nanmean(1) for group in groups], 1)
