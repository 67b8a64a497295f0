"""The learner that a saved state belongs to, made again without its images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torchvision.transforms import InterpolationMode

from pycil_wsc.config.image_config import KEYS, Config
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.data_options import AugmentationOptions
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.data.types import Arrivals, Dataset, DatasetInfo, Split
from pycil_wsc.devices import numbered, out_of_memory, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.keys import declared
from pycil_wsc.methods.configured import new_learner
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.seeding import restored
from pycil_wsc.state import State
from pycil_wsc.training.learner import BaseLearner, regrow
from pycil_wsc.training.processes import SINGLE_PROCESS

LARGEST_SIDE = 1 << 16  # largest side of an image, in pixels


class Reached(NamedTuple):
    """How far a run, or a learner, has come.

    ``class_order``: its labels in learning order. ``boundaries``: of its tasks in this order, 0 first. ``task``: the
    last one, counted from 0.
    """

    class_order: list[int]
    boundaries: list[int]
    task: int

    @classmethod
    def of_stream(cls, seen: Sequence[int]) -> Reached:
        """That of a learner with ``seen[t]`` classes after task t; they are numbered in learning order."""
        return cls(list(range(seen[-1])), [0, *seen], len(seen) - 1)

    @property
    def classes(self) -> list[int]:
        """The labels of the classes seen, in learning order."""
        return self.class_order[: self.boundaries[self.task + 1]]


def with_weights_elsewhere(values: State) -> State:
    """The keys of a learner whose weights come from a saved state, and not from those it was ``pretrained`` with.

    What follows from ``pretrained`` is then said: whether the first task has trained the backbone.
    """
    adapt = {"adapt": not values.get("pretrained")} if values.get("adapt", True) is None else {}
    return {**values, "pretrained": False, **adapt}


def config_with_weights_elsewhere(config: Config) -> Config:
    """The same of a configuration."""
    options = config.options
    if getattr(options, "adapt", True) is None:
        options = dataclasses.replace(options, adapt=not config.pretrained)
    return dataclasses.replace(config, pretrained=False, options=options)


def rebuilt(
    config: Config,
    info: DatasetInfo,
    reached: Reached,
    state: State,
    images: Split | None = None,
    lent: Backbone | None = None,
) -> BaseLearner:
    """The learner of ``config`` with this ``state``, in which it was after the task ``reached``.

    ``images``: those that its outputs can be asked for, as training samples; None: no images. ``lent``: a backbone with
    the weights of the ``state``, if the method leaves it as it is; None: it makes its own.
    """
    learner = grown(config, info, reached, images, lent)
    try:
        learner.load_state_dict(state)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise UserError(
            f"the weights do not match the learner '{config.model_name}' of this version; use the version that saved "
            "them"
        ) from None
    return learner


def grown(
    config: Config, info: DatasetInfo, reached: Reached, images: Split | None = None, lent: Backbone | None = None
) -> BaseLearner:
    """A learner of ``config`` with the classes of the tasks ``reached``, but new weights; the others: as above."""
    device = numbered(resolved_device(config.device))
    none = Split(np.empty((0, info.image_size, info.image_size, 3), np.uint8), np.empty(0, np.int64))
    train = none if images is None else images
    boundaries = tuple(reached.boundaries[1:])
    arrivals = Arrivals(boundaries, np.zeros_like(train.targets), none.targets) if config.is_stream else None
    manager = tasks_of(Dataset(info, train, none, arrivals=arrivals), config)
    configured = Reached(manager.class_order, manager.boundaries, reached.task)
    if reached != configured or reached.task not in range(len(manager.tasks)):
        raise UserError("its classes and tasks do not match its configuration; use an unmodified file")
    with restored([]):  # once, not for each part: a thread that trains has it for an epoch
        source = open_source(info, train, device, 0)
        learner = new_learner(config, manager, source, device, SINGLE_PROCESS, lent=lent)
        regrow(learner, manager.tasks[: reached.task + 1])
        _ = learner.precision.name  # which may draw random numbers, too: predicting must not wait
    return learner


def checked_info(saved: State) -> DatasetInfo:
    """The :class:`DatasetInfo` with the ``saved`` values; raises an exception if they are invalid."""
    info, number = DatasetInfo(**saved), (int, float)
    fits = isinstance(info.classes, tuple) and all(isinstance(name, str) for name in info.classes)
    fits &= info.crop in ("pad", "resized") and info.interpolation in [mode.value for mode in InterpolationMode]
    for side in (info.image_size, info.stored_size or info.image_size):
        fits &= type(side) is int and 0 < side <= LARGEST_SIDE
    usual = {field.name: field.default for field in dataclasses.fields(DatasetInfo)}
    for name in declared(AugmentationOptions):
        value = getattr(info, name)
        fits &= (value is not None or usual[name] is None) and KEYS[name].check(value) == value
    fits &= type(info.own_transforms) is bool
    for triple in (info.mean, info.std):
        fits &= len(triple) == 3 and all(type(value) in number and math.isfinite(value) for value in triple)
    if not fits or not all(info.std):
        raise ValueError("not the description of a data set")
    return info
