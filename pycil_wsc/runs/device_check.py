"""Small tasks before the first: what an accelerator cannot do is found before training, not within it."""

import logging
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pycil_wsc import seeding
from pycil_wsc.data.batches.loader import ArraySource
from pycil_wsc.data.tasks.tasks import TaskSequence
from pycil_wsc.data.types import Split
from pycil_wsc.devices import out_of_memory, widest_float
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.runs.predictions import predictions, predictions_of
from pycil_wsc.studies.records import Records
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.step import cost as step_cost

TASKS = 3
CLASSES = 2  # per task
IMAGES = 10  # per class: a tenth of them, which a method may hold out, is one
BATCH = 8


def check_device(learner: BaseLearner, analyses: Sequence[str] = ()) -> None:
    """Let another learner of the same settings learn small tasks on the device, as the run will: each loss and hook
    of the method that an epoch has, its analyses and optimiser, the choice of exemplars and the test.

    Raises :class:`UserError` if the device lacks an operator or a dtype. The CPU lacks none. Leaves no trace, since all
    random numbers have an address of their own.
    """
    device = learner.device
    precision = learner.precision.name
    config = learner.config
    if device.type == "cpu":
        return
    try:
        with seeding.seeded(learner.config.seed, "device check", device=device):
            _augment(learner)
            _learn(learner, device, analyses)
    except Exception as error:
        if out_of_memory(error):
            raise
        if not _the_cpu_can(learner, analyses):
            return
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"device: '{device}' cannot train '{config.method}' on '{config.convnet_type}' in {precision} "
            f"({first_line(error)}, in {_place(error)}); try another precision, or --device cpu"
        ) from error
    if analyses and widest_float(device) != torch.float64:
        logging.getLogger("pycil_wsc").warning("analyse: '%s' has no float64; sums are in float32", device)


def _the_cpu_can(learner, analyses):
    """Whether the CPU can do it. An error that it raises too is not the device's: the run itself will show it."""
    try:
        with seeding.seeded(learner.config.seed, "device check"):
            _learn(learner, torch.device("cpu"), analyses)
    except Exception:
        return False
    return True


def _place(error):
    """The line that raised it, outside of torch and of what counts its operations."""
    frames = traceback.extract_tb(error.__traceback__)
    passed_on = step_cost.__file__
    inside = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != passed_on]
    return f"{Path(inside[-1].filename).name} line {inside[-1].lineno}"


def _augment(learner):
    """Load two images of the run, from wherever they are, and augment them."""
    two = learner.manager.tasks[0].train_indices[:2]
    for _ in learner.batches.source.batches(two, learner.manager.train_targets, 2, train=True):
        pass


def _learn(learner, device, analyses):
    manager, info = _small_tasks(learner.manager), learner.batches.source.info
    if not isinstance(learner.batches.source, ArraySource):
        info = replace(info, crop="pad")  # crops of image files are not made on the device
    side = info.stored_size or info.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (len(manager.train_targets), side, side, 3), np.uint8)
    # the same images are trained on and tested
    source = ArraySource(info, Split(pixels, manager.train_targets), device)
    other = type(learner)(_short(learner.config), manager, source, device)
    with tempfile.TemporaryDirectory() as folder:
        records = Records(analyses, other, Path(folder))
        for task in manager.tasks:
            other.learn(task, records)
            _test(other, source, task, learner.config.batch_size)


def _test(other, source, task, batch_size):
    """In the run's own batches: torch computes distances of many features by other operators than those of a few."""
    short = other.config
    other.config = replace(short, batch_size=batch_size)
    tested = predictions(other, source, task)
    other.processes.all(tested.finite)  # waits, so that what the device reports late is raised here
    for network in other.also_tested().values():
        predictions_of(network, other, source, task)
    other.config = short


def _small_tasks(manager):
    """Up to three, since a method may do something new in its third. Each brings new classes if the run's does."""
    seen = [0]
    for task in manager.tasks[:TASKS]:
        seen.append(seen[-1] + (CLASSES if task.num_new else 0))
    number = len(seen) - 1
    tasks = np.repeat(np.arange(number), CLASSES * IMAGES)
    newest = [max(0, known - CLASSES) + np.arange(CLASSES) for known in seen[1:]]  # the classes of each task
    targets = np.repeat(np.concatenate(newest), IMAGES)
    return TaskSequence(list(range(seen[-1])), seen, targets, targets, tasks, tasks)


def _short(config):
    """The configuration for a single epoch of small batches in each phase, with a reset if it is consolidated."""
    epochs = dict.fromkeys(("init_epoch", "epochs", *configured_learner(config).Plan.epoch_keys), 1)
    options = {name: 1 for name in (*epochs, "recycle_every") if name in vars(config.options)}
    wsc = {"trigger": "warmup", "warmup": 0.25, "average_every": 0.01}
    return replace(
        config,
        **{name: 1 for name in epochs if name not in options},
        options=replace(config.options, **options),
        wsc=replace(config.wsc, **wsc),
        batch_size=min(config.batch_size, BATCH),
        warmup_epochs=0,
        pretrained=False,
        compile=False,
    )
