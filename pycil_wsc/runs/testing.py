"""Tests a learner after each task: accuracies on the test images of the classes seen."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.consolidation.batch_norm import restored_modes
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.files import Json
from pycil_wsc.results import metrics
from pycil_wsc.runs.held import held
from pycil_wsc.runs.predictions import predictions, predictions_of
from pycil_wsc.state import State
from pycil_wsc.training.learner import BaseLearner


class Anytime:
    """The accuracy on all classes seen after every ``every``-th optimiser step of the run; None: never.

    Attributes:
        steps: optimiser steps so far.
        curve: [steps, accuracy in percent] of each test within the current task.
    """

    def __init__(self, learner: BaseLearner, source: Source, every: int | None) -> None:
        self.learner = learner
        self.source = source
        self.every = every
        self.steps = 0
        self.curve: list[list[float]] = []

    def due(self) -> bool:
        """Count a step; whether a test is due."""
        if self.every is None:
            return False
        self.steps += 1
        return self.steps % self.every == 0

    def test(self, task: Task) -> None:
        """Test the learner within a task, and leave its modes as they are."""
        learner = self.learner
        if not len(task.test_indices):
            return
        targets = learner.manager.test_targets
        right = torch.zeros((), dtype=torch.int64, device=learner.device)
        with restored_modes(learner):
            for features, labels in learner.outputs.in_batches(self.source, task.test_indices, targets):
                with torch.inference_mode(), learner.precision.autocast():
                    right += (learner.classify(features).argmax(1) == labels).sum()
        accuracy = 100 * learner.processes.sum(right).item() / len(task.test_indices)
        self.curve.append([self.steps, accuracy])

    def taken(self) -> dict[str, Json]:
        """The tests of the task that has ended, for its line of ``metrics.jsonl``; nothing without any."""
        curve, self.curve = self.curve, []
        return {"anytime": curve} if self.every is not None else {}

    def state_dict(self) -> State:
        return {"steps": self.steps, "curve": [list(point) for point in self.curve]}

    def load_state_dict(self, state: State) -> None:
        self.steps = state["steps"]
        self.curve = [[int(step), float(accuracy)] for step, accuracy in state["curve"]]


class Evaluator:
    """Tests ``learner`` on the images of ``source``. ``trained_on``: all training images, as in :func:`held`.

    ``check(finite, what)`` raises an exception unless the flag ``finite``, on the device, is set in all processes.
    """

    def __init__(
        self, learner: BaseLearner, source: Source, check: Callable[[Tensor, str], None], trained_on: np.ndarray
    ) -> None:
        self.learner = learner
        self.source = source
        self.trained_on = trained_on
        self.check = check
        self.confusion: list[list[float]] | None = None  # after the last task, of at most metrics.MOST_CONFUSED classes

    def test(self, task: Task) -> dict[str, Json]:
        """What ``metrics.jsonl`` tells of the task just learned; has accuracies if there are test images."""
        learner = self.learner
        parts = held(learner, self.trained_on)
        line = {
            "task": task.index,
            "num_seen": task.num_seen,
            "exemplars": len(learner.memory),
            "images_trained": learner.spent.images,
            "train_flops": learner.spent.operations,
            "parameters": sum(parameter.numel() for parameter in learner.network.parameters()),
            "held_bytes": None if parts is None else sum(parts.values()),
            "held": parts,
            **learner.spent.costs,
        }
        if len(task.test_indices):
            line |= self._accuracies(task)
        return line

    def _accuracies(self, task: Task) -> dict[str, Json]:
        """Those of the learner, of the nearest-mean-of-exemplars classifier, and of additional networks."""
        manager = self.learner.manager
        targets = manager.test_targets[task.test_indices]
        tasks = manager.test_tasks[task.test_indices]
        predicted = predictions(self.learner, self.source, task)
        self.check(predicted.finite, "the test logits")
        line = metrics.scores("cnn", predicted.cnn, targets, tasks)
        line["cnn_known"] = metrics.accuracy(predicted.known, targets)
        line["cnn_known_tasks"] = metrics.task_accuracies(predicted.known, targets, tasks)
        if predicted.nme is not None:
            line |= metrics.scores("nme", predicted.nme, targets, tasks)
        for name, network in self.learner.also_tested().items():
            best, finite = predictions_of(network, self.learner, self.source, task)
            self.check(finite, "the test logits")
            line[f"{name}_top1"] = metrics.accuracy(best, targets)
        if task.index + 1 == len(manager.tasks):
            line["cnn_classes"] = metrics.of_classes(predicted.cnn, targets)
        if task.num_seen == len(manager.class_order) and task.num_seen <= metrics.MOST_CONFUSED:
            self.confusion = metrics.confusion_matrix(predicted.cnn, targets, task.num_seen).tolist()
        return line
