"""A learner that learns three small tasks on a device with every optimiser, without a run around it."""

import itertools
from collections import Counter
from unittest.mock import patch

import simulated_device
import torch
from support.small_runs import SETTINGS, suited, uncounted

from pycil_wsc import registry
from pycil_wsc.config.image_config import KEYS
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.devices import resolved_device
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.runs.predictions import predictions, predictions_of
from pycil_wsc.training import loop

SCHEDULES = [  # by epoch and by iteration; each epoch has several steps
    *({"scheduler": name, "schedule_unit": "epoch", "epochs": 2} for name in KEYS["scheduler"].choices),
    {"scheduler": "steplr", "schedule_unit": "iteration", "epochs": 2, "batch_size": 6, "warmup_epochs": 1},
    {"scheduler": "cosine", "schedule_unit": "iteration", "epochs": 1, "batch_size": 6},
    {"scheduler": "restarts", "schedule_unit": "iteration", "epochs": 1, "batch_size": 6},
]
for schedule in SCHEDULES:  # the rate falls after the first epoch
    schedule["milestones"] = schedule["init_milestones"] = [1][: schedule["epochs"] - 1]
OPTIMIZERS = sorted(registry.optimizers)
assert {(each["scheduler"], each["schedule_unit"]) for each in SCHEDULES} == set(
    itertools.product(KEYS["scheduler"].choices, KEYS["schedule_unit"].choices)
)
USUAL = {"memory_per_class": 2, "batch_size": 10, "precision": "fp32", "clip_norm": 0.5, "wsc.warmup": 0.5}
USUAL |= {"convnet_options.width": 4}


class Steps(Counter):
    """How often a step of training had each pair (waits, uploads), from the end of one step to the end of the next.

    The first step of an epoch does not count: before it, the epoch's order and targets are copied to the device.
    """

    last = None

    def ended(self):
        """A step has ended."""
        now = simulated_device.total()
        if self.last:
            self[now.waits - self.last.waits, now.uploads - self.last.uploads] += 1
        self.last = now

    def interrupted(self):
        """What happens until the next step has ended is no step's."""
        self.last = None


def pairs_of(name):
    """Settings of a learner's training: each optimiser, and as many schedules, both by epoch and by iteration.

    All learners together have all pairs.
    """
    shift = sorted(registry.learners).index(name)
    return [
        {"optimizer": optimizer} | SCHEDULES[(shift + 2 * number) % len(SCHEDULES)]
        for number, optimizer in enumerate(OPTIMIZERS)
    ]


class Course:
    """Each task is trained with several pairs of an optimiser and a schedule, one after another.

    A learner's pairs are dealt to the tasks that the method trains.
    """

    def __init__(self, name, data, device):
        usual = {key: value for key, value in USUAL.items() if not suited(name) or not key.startswith("convnet")}
        keys = SETTINGS | usual | suited(name) | {"dataset": f"npz:{data}", "model_name": name, "device": device}
        epochs = ["init_epoch", *registry.learners[name].Plan.epoch_keys]
        self.configs = [resolve(keys | pair | dict.fromkeys(epochs, pair["epochs"])) for pair in pairs_of(name)]
        self.device, config = resolved_device(device), self.configs[0]
        dataset = for_training(Datasets().of(config), config)
        self.manager = tasks_of(dataset, config)
        self.source = open_source(dataset.info, dataset.train, self.device, 0)
        self.test_source = open_source(dataset.info, dataset.test, self.device, 0)
        self.learner = configured_learner(config)(config, self.manager, self.source, self.device)
        self.trained = [task for task in self.manager.tasks if self.learner.plan.planned_epochs(task)]
        self.done, self.steps = 0, Steps()
        self.phase, self.phases, self.counted = "", set(), set()  # names: all, those with steps that count

    def take(self):
        """Learn the tasks. Returns what the networks predict after each."""
        found = []
        for task in self.manager.tasks:
            with uncounted(), patch.object(loop, "train", self.train):
                self.learner.learn(task, self)
            tested = predictions(self.learner, self.test_source, task)
            found.append([tested.cnn.tolist(), tested.known.tolist(), tested.nme is not None and tested.nme.tolist()])
            for network in self.learner.also_tested().values():
                found.append(predictions_of(network, self.learner, self.test_source, task)[0].tolist())
        if self.trained:
            assert self.done == len(self.configs)
        return found

    def train(self, learner, task, monitor, resume, plain=loop.train):
        """In place of the training of a task: that with each of its pairs."""
        if task not in self.trained:
            return plain(learner, task, monitor, resume)
        for learner.config in self.configs[self.trained.index(task) :: len(self.trained)]:
            plain(learner, task, monitor, resume)
            self.done += 1

    # ---- events reported by the loop -----------------------------------------------------------------------------

    def task_started(self, task):
        pass

    def task_trained(self, task):
        assert all(parameter.isfinite().all() for parameter in self.learner.parameters())

    def phase_started(self, task, run):
        self.steps.interrupted()
        self.phase = run.phase.name
        self.phases.add(self.phase)

    def epoch_ended(self, *arguments):
        self.steps.interrupted()

    def step(self, images):
        if self.device.type == "cpu":
            return
        if self.steps.last:
            self.counted.add(self.phase)
        self.steps.ended()


def tensors_of(thing, path="learner", seen=None):
    """(path, tensor) of every tensor that ``thing`` holds: in its attributes, lists, tuples, sets and dictionaries."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield path, thing
    if isinstance(thing, dict):
        parts = thing.items()
    elif isinstance(thing, (list, tuple, set)):
        parts = enumerate(thing)
    elif type(thing).__module__.partition(".")[0] in ("pycil_wsc", "torch", "support"):
        parts = getattr(thing, "__dict__", {}).items()
    else:
        return
    for number, (name, part) in enumerate(list(parts)):
        # keys may be tensors, whose names would be their numbers, copied from the device
        yield from tensors_of(part, f"{path}.{name if isinstance(name, str) else number}", seen)
