"""One run: tasks -> learner -> metrics -> checkpoint -> result.json."""

import contextlib
import copy
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.options import Config, in_file
from pycil_wsc.consolidation import NonFiniteGradients
from pycil_wsc.data.fingerprint import fingerprint
from pycil_wsc.data.loader import open_source
from pycil_wsc.data.tasks import Task, tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import device_name, peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.engine.environment import deterministic
from pycil_wsc.engine.phase import Phase, Resume
from pycil_wsc.engine.processes import Processes, backend_of
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.files import save_tensors, write_atomically, write_json
from pycil_wsc.results import write_result
from pycil_wsc.runs import first_task, metrics, weights
from pycil_wsc.runs.checkpoint import CHECKPOINT, read_checkpoint
from pycil_wsc.runs.planning import check_plan, plan_of
from pycil_wsc.runs.progress import Progress, TaskBar, open_log, print_task
from pycil_wsc.runs.rehearsal import rehearse
from pycil_wsc.runs.result import result_of
from pycil_wsc.runs.tensorboard import Scalars
from pycil_wsc.runs.testing import accuracy_of, predictions
from pycil_wsc.runs.weights_and_biases import WandB
from pycil_wsc.studies.records import Records


class Run:
    """One run of a sweep, in its own folder. Resumes from a checkpoint if there is one, and writes ``result.json``.

    Args:
        config: the configuration.
        dataset: the data set, with the held-out part that ``config`` specifies.
        on_progress: called with every :class:`pycil_wsc.runs.progress.Progress`.
        folder: folder of the run's files; None: the configuration's ``run_folder``.
        start: the :meth:`state` after earlier tasks. ``dataset`` must then have the exemplars of these tasks, but no
            other samples of them.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        on_progress: Callable[[Progress], None] = print_task,
        folder: Path | None = None,
        start: Mapping[str, Any] | None = None,
    ):
        if dataset.validation_share != config.validation_split:
            raise ValueError(
                "the data set must have the held-out part that the configuration specifies: "
                "load it with pycil_wsc.launch.attempt.Datasets"
            )
        self.config, self.dataset, self.on_progress, self.start = config, dataset, on_progress, start
        self.folder = folder or config.run_folder
        self.data = dataset.fingerprint or fingerprint(dataset.train, dataset.test)
        self.processes = Processes(config.timeout_minutes)
        self.device = self.processes.device(resolved_device(config.device))
        self.manager = tasks_of(dataset, config)
        self.train_source = open_source(dataset.info, dataset.train, self.device, config.num_workers)
        self.test_source = open_source(dataset.info, dataset.test, self.device, config.num_workers)
        self.learner = config.learner(config, self.manager, self.train_source, self.device, self.processes)
        self.records = Records(config, self.learner, self.folder)
        self.class_names = [dataset.info.classes[label] for label in self.manager.class_order]
        self.history = []  # the lines of metrics.jsonl: a dict per task
        self.curves = new_curves()  # of the current task: a value per epoch
        self.confusion = None  # the confusion matrix after the last task
        self.plan = plan_of(config, self.manager, start)  # training images of each task
        self.clock = {"train_seconds": 0.0, "total_seconds": 0.0, "saved_seconds": 0.0}
        self.peak_memory = 0
        self.resumes = False  # whether the run resumes from a checkpoint and has not reported it yet

    def execute(self) -> dict[str, Any]:
        """Train and test every task; returns the contents of ``result.json``."""
        self.learn()
        if self.config.save_weights is True and self.processes.first:
            weights.save(self.folder, self.learner)
        result = result_of(self)
        if self.processes.first:
            write_result(self.folder, result)
        if self.processes.first and not self.config.tasks:  # a longer list of tasks resumes from it
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result.contents()

    def learn(self) -> None:
        """Train and test every task that is left."""
        with contextlib.ExitStack() as self.writers:  # closed, too, if the run fails
            self._learn_all()

    def _learn_all(self):
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        deterministic(self.config.deterministic)
        self.log = open_log(self.folder) if self.processes.first else logging.getLogger("pycil_wsc.following")
        self._write(write_json, "config.json", in_file(self.config.to_dict()))
        if not self.processes.agree(self.data):
            raise UnusableRun(f"{self.folder}: not all processes have the same data; give all machines the same files")
        keep_freed_memory(self.device)
        rehearse(self.learner)
        reset_peak_memory(self.device)
        first, resume = self._restore()
        self.scalars = list(self._scalars())
        where = device_name(self.device)
        if self.processes.count > 1:
            where += f", {self.processes.count} processes over {backend_of(self.device.type)}"
        self.log.info("%s on %s, %s", self.folder, where, self.learner.precision)
        self.mark = self.saved_at = time.perf_counter()
        for task in self.manager.tasks[first:]:
            self.bar = TaskBar(self.on_progress, task, len(self.manager.tasks))
            try:
                self._learn(task, resume)
            except NonFiniteGradients as error:
                raise TrainingDiverged(f"{self.bar.task}: {error}") from None
            check_plan(self.plan, self.learner, task)
            resume = None
            self._tick()
            self.history.append(self._test(task))
            self.curves = new_curves()
            self._write(write_atomically, "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
            for scalars in self.scalars:
                scalars.task_ended(self.history)
            if self.config.save_weights == "every" and self.processes.first:
                weights.save(self.folder, self.learner, task.index)
            self._checkpoint(end_of(task), None)
            self.bar.say(summary(self.history[-1]))
            self.log.info("%s %s", self.bar.task, summary(self.history[-1]))

    def _scalars(self):
        """The writers of the run's scalars."""
        if not self.processes.first:
            return
        if self.config.tensorboard:
            scalars = Scalars(self.folder / "tensorboard", self._epochs_done(), len(self.history))
            yield self.writers.enter_context(contextlib.closing(scalars))
        if self.config.wandb:
            name = "/".join(self.folder.parts[-3:])
            scalars = WandB(self.folder, self.config.to_dict(), name, self.history, self.curves)
            yield self.writers.enter_context(contextlib.closing(scalars))

    def _learn(self, task, resume):
        """Learn a task. The first task is loaded if another run has trained it and this run has not started it."""
        if task.index or not (self.config.cache_first_task and self.learner.plain_first_task):
            self.learner.learn(task, self, resume)
            return
        with first_task.shared(self, self.dataset) as entry:
            self._tick()
            taken = None if resume or self.records.watch_epochs else entry.load()
            trained = self.processes.broadcast(taken)
            self.learner.learn(task, self, resume, trained=trained and trained["learner"])
            if trained:
                self._count_loaded(trained)
            else:
                self._tick()
                own = {
                    "clock": self.clock,
                    "curves": self.curves,
                    "peak_memory": max(self.peak_memory, peak_memory(self.device)),
                }
                entry.save({"learner": self.learner.trained_state()} | own)

    def _count_loaded(self, trained):
        """Count the loaded first task as if this run had trained it."""
        seconds = trained["clock"]["train_seconds"]
        self.log.info("%s taken from a run that shares it, %.1f s saved", self.bar.task, seconds)
        for name in ("train_seconds", "total_seconds", "saved_seconds"):
            self.clock[name] += trained["clock"]["train_seconds"]
        self.peak_memory, self.curves = max(self.peak_memory, trained["peak_memory"]), trained["curves"]
        for scalars in self.scalars:
            for epoch, (loss, accuracy) in enumerate(zip(*self.curves.values())):
                scalars.epoch_ended(epoch, loss=loss, accuracy=accuracy)
        self.bar.loaded(self.learner.images_trained)

    # ---- events reported by the learner ------------------------------------------------------------------------------

    def task_started(self, task: Task) -> None:
        self.records.task_started(task)

    def phase_started(self, task: Task, phase: Phase, first: int) -> None:
        self._tick()
        self.bar.start(phase.name, first, phase.epochs, self.learner.images_trained)
        if self.resumes:
            self.resumes = False
            ended = first == phase.epochs  # stopped while exemplars were chosen, or in the test
            where = f"after {phase.name} epoch {first}" if ended else f"with {phase.name} epoch {first + 1}"
            line = f"resumes {where}/{phase.epochs}"
            self.log.info("%s %s", self.bar.task, line)
            self.bar.say(line)

    def step(self, images: int) -> None:
        self.bar.step(images * self.processes.count)

    def epoch_ended(self, task: Task, number: int, phase: Phase, epoch: int, loss: float, accuracy: float) -> None:
        seconds = self._tick("train_seconds")
        self.bar.epoch(epoch, loss, accuracy)
        self.log.info(
            "%s %s epoch %d/%d: loss %.4f, train accuracy %.2f",
            self.bar.task,
            phase.name,
            epoch + 1,
            phase.epochs,
            loss,
            accuracy,
        )
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss became {loss} in {self.bar.task}, epoch {epoch + 1}; try a lower learning rate"
            )
        for scalars in self.scalars:
            rate, speed = phase.optimizer.param_groups[0]["lr"], len(phase.indices) / seconds
            scalars.epoch_ended(
                self._epochs_done(), loss=loss, accuracy=accuracy, learning_rate=rate, images_per_second=speed
            )
        self.curves["train_loss"].append(loss)
        self.curves["train_accuracy"].append(accuracy)
        self.records.epoch_ended(task)
        self._tick()  # what was recorded is no training
        if self.mark - self.saved_at >= self.config.checkpoint_seconds:
            self._checkpoint({"task": task.index, "phase": number, "epoch": epoch + 1}, phase.optimizer.state_dict())

    def task_trained(self, task: Task) -> None:
        flags = [parameter.isfinite().all() for parameter in self.learner.parameters()]
        self._check(torch.stack(flags).all(), "the weights")
        self.records.task_trained(task)

    def _check(self, finite, what):
        """Raise :class:`TrainingDiverged` unless the flag ``finite``, on the device, is set in all processes.

        The loss is not enough: that of the last step is computed before its update.
        """
        if not self.processes.all(finite):
            raise TrainingDiverged(
                f"{what} are no longer finite numbers after {self.bar.task}; try a lower learning rate"
            )

    # ---- saving and resuming -----------------------------------------------------------------------------------------

    def _checkpoint(self, position, optimizer):
        self._tick()
        self._write(save_tensors, CHECKPOINT, self.state(position, optimizer))
        self._tick()  # saving does not count as training
        self.saved_at = self.mark

    def state(self, position: Mapping[str, int], optimizer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state to resume from: tensors, numbers, strings, and lists and dicts of these.

        ``position``: the next task, phase and epoch; ``optimizer``: the optimiser's state, within a task.
        """
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        state: dict[str, Any] = {"position": position, "learner": self.learner.state_dict(), "optimizer": optimizer}
        state |= {
            "history": self.history,
            "curves": self.curves,
            "confusion": self.confusion,
            "records": self.records.state_dict(),
        }
        state |= {"clock": self.clock, "peak_memory": self.peak_memory, "identity": self.config.identity()}
        state["data"] = self.data
        return state

    def _write(self, write, name, content):
        """Call ``write(path, content)`` for a file in the run's folder, in the first process only."""
        if self.processes.first:
            write(self.folder / name, content)

    def _restore(self):
        """Restore the saved state, if any; returns (index of the next task, the position in it or None)."""
        path = self.folder / CHECKPOINT
        found = self.processes.from_first(lambda: read_checkpoint(path, self.config, self.data))
        state = found or self.start
        if state is None:
            return 0, None
        if self.start and losses(state["history"])[: len(self.start["history"])] != losses(self.start["history"]):
            raise UnusableRun(f"{path}: was made from another learner; delete it to start this task again")
        # copies: what training changes must not change ``start``
        changing = ("curves", "history", "clock", "records")
        self.curves, self.history, self.clock, records = copy.deepcopy([state[name] for name in changing])
        position, self.confusion, self.peak_memory = state["position"], state["confusion"], state["peak_memory"]
        self.records.load_state_dict(records)
        self.resumes = found is not None
        for task in self.manager.tasks[: position["task"]]:
            self.learner.grow_for(task)
        if state["optimizer"] is not None:
            return position["task"], Resume(position["phase"], position["epoch"], state["learner"], state["optimizer"])
        self.learner.load_state_dict(state["learner"])
        return position["task"], None

    def _epochs_done(self):
        return sum(len(curves["train_loss"]) for curves in [*self.history, self.curves])

    def _tick(self, *names):
        """Add the time since the last tick to the total and to the named clocks; returns it in seconds."""
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        for name in {"total_seconds", *names}:
            self.clock[name] += seconds
        return seconds

    # ---- testing -----------------------------------------------------------------------------------------------------

    def _test(self, task):
        """The line of ``metrics.jsonl`` for the task just learned; has accuracies if there are test images."""
        learner = self.learner
        parameters = sum(p.numel() for p in learner.network.parameters())
        line = {
            "task": task.index,
            "num_seen": task.num_seen,
            "exemplars": len(learner.memory),
            "images_trained": learner.images_trained,
        }
        line |= {"train_flops": learner.train_flops, "parameters": parameters} | learner.costs()
        line |= self._accuracies(task) if len(task.test_indices) else {}
        self._tick()
        return line | self.curves | self.clock

    def _accuracies(self, task):
        """Accuracies of the learner, of the nearest-mean-of-exemplars classifier, and of additional networks."""
        found = predictions(self.learner, self.test_source, task)
        self._check(found.finite, "the test logits")
        targets, tasks = (each[task.test_indices] for each in (self.manager.test_targets, self.manager.test_tasks))
        line = found.accuracies(targets, tasks)
        for name, network in self.learner.also_tested().items():
            line[f"{name}_top1"], finite = accuracy_of(network, self.learner, self.test_source, task)
            self._check(finite, "the test logits")
        if task.num_seen == len(self.class_names):
            self.confusion = metrics.confusion_matrix(found.cnn, targets, task.num_seen).tolist()
        return line


def end_of(task: Task) -> dict[str, int]:
    """The position of a run after ``task``."""
    return {"task": task.index + 1, "phase": 0, "epoch": 0}


def losses(history: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The training losses of each task, which tell learners of the same images and settings apart."""
    return [line["train_loss"] for line in history]


def new_curves() -> dict[str, list[float]]:
    return {"train_loss": [], "train_accuracy": []}


def summary(line: Mapping[str, Any]) -> str:
    accuracy = f"loss {line['train_loss'][-1]:.3f}" if line["train_loss"] else "not trained"
    if "cnn_top1" in line:
        nme = f", NME {line['nme_top1']:.2f}" if "nme_top1" in line else ""
        accuracy = f"CNN {line['cnn_top1']:.2f}{nme}, newest task {line['cnn_tasks'][-1]:.2f}"
    return f"{line['num_seen']} classes: {accuracy}, {line['exemplars']} exemplars"
