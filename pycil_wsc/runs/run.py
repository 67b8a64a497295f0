"""One run: tasks -> learner -> metrics -> checkpoint -> result.json."""

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.config_checks import remarks
from pycil_wsc.config.image_config import Config, in_file
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.consolidation import NonFiniteGradients
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.data.images.fingerprint import fingerprint
from pycil_wsc.data.images.image_files import line_of
from pycil_wsc.data.tasks.tasks import Task, tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import device_name, reset_peak_memory, resolved_device
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.files import Json, write_json
from pycil_wsc.methods.configured import new_learner
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.reproducibility import deterministic, threads
from pycil_wsc.results import write_result
from pycil_wsc.runs import first_task
from pycil_wsc.runs.checkpoint import (
    CHECKPOINT,
    arithmetic,
    keep_arithmetic,
    pretrained_of,
    read_checkpoint,
    save_weights,
    with_pretrained,
    without_pretrained,
)
from pycil_wsc.runs.device_check import check_device
from pycil_wsc.runs.journal import Journal, summary
from pycil_wsc.runs.planning import check_plan, plan_of, too_slow
from pycil_wsc.runs.progress import Progress, print_task
from pycil_wsc.runs.result import result_of
from pycil_wsc.runs.testing import Anytime, Evaluator
from pycil_wsc.state import State, save_state
from pycil_wsc.studies.records import Records
from pycil_wsc.training.learner import regrow
from pycil_wsc.training.learner_state import first_task_state
from pycil_wsc.training.phase import Monitor, PhaseRun, Resume
from pycil_wsc.training.processes import Processes, backend_of


class Run(Monitor):
    """One run of a sweep, in its own folder. Resumes from a checkpoint if there is one, and writes ``result.json``.

    Args:
        config: the configuration.
        dataset: the data set, with the held-out part that ``config`` specifies.
        on_progress: called with every :class:`pycil_wsc.runs.progress.Progress`.
        folder: folder of the run's files; None: that of the configuration.
        start: the :meth:`state` after earlier tasks, of which ``dataset`` has the exemplars but no other samples.
        checkpoints: whether it may be stopped and resumed; False: its folder is temporary, and it writes neither
            checkpoints nor a log.
        lent: the backbone of another learner with the weights of ``start``, if the method leaves it as it is; None: the
            learner makes its own.

    Raises:
        UserError: the device, the backbone or the method cannot be used as configured.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        on_progress: Callable[[Progress], None] = print_task,
        folder: Path | None = None,
        start: State | None = None,
        checkpoints: bool = True,
        lent: Backbone | None = None,
    ):
        if dataset.validation_share != config.validation_split:
            raise ValueError("dataset: lacks the configured held-out part; load it with launch.attempt.Datasets")
        self.config = config
        self.dataset = dataset
        self.start = start
        self.checkpoints = checkpoints
        self.folder = folder or run_folder(config)
        self.data = dataset.fingerprint or fingerprint(dataset.train, dataset.test)
        self.processes = Processes(config.timeout_minutes)
        self.device = self.processes.device(resolved_device(config.device))
        self.manager = tasks_of(dataset, config)
        self.train_source = open_source(dataset.info, dataset.train, self.device, config.num_workers)
        self.test_source = open_source(dataset.info, dataset.test, self.device, config.num_workers)
        given = self.manager, self.train_source, self.device, self.processes
        self.learner = new_learner(config, *given, lent=lent)
        self.lent = {id(parameter) for parameter in lent.parameters()} if lent else set()  # which stay as they are
        saves = self.processes.first and (checkpoints or config.save_weights is not False)
        self.pretrained = pretrained_of(self.learner) if saves else None
        self.journal = Journal(self.folder, on_progress, len(self.manager.tasks), self.processes.first and checkpoints)
        self.evaluator = Evaluator(self.learner, self.test_source, self._check, dataset.train.images)
        self.anytime = Anytime(self.learner, self.test_source, config.evaluate_every)
        self.records = Records(config.analyse, self.learner, self.folder)
        self.plan = plan_of(config, self.manager, start)  # training images of each task
        self.remarks = remarks(config, self.manager)  # to be said once
        if line := line_of(dataset.left_out):
            self.remarks.append(line)
        self.task = 0  # the index of the present one
        self.first_task = ""  # the name of its file, as the first task began: it is of this device and code
        self.resumes = False  # whether the run resumes from a checkpoint and has not reported it yet
        self.saved_at, self.pause = time.perf_counter(), config.checkpoint_seconds

    def execute(self) -> dict[str, Json]:
        """Train and test every task; returns the contents of ``result.json``.

        Raises:
            UserError, UnusableRun, TrainingDiverged, WrongPlan: see :meth:`pycil_wsc.config.kinds.Kind.execute`.
        """
        with threads(self.config.threads):
            self.learn()
            if self.config.save_weights is True and self.processes.first:
                save_weights(self.folder, self.learner, self.config, self.pretrained)
            confusion = self.evaluator.confusion
            result = result_of(self.config, self.dataset, self.data, self.learner, self.journal, confusion)
        if self.processes.first:
            write_result(self.folder, result)
        if self.processes.first and not self.config.tasks:  # a longer list of tasks resumes from it
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result.contents()

    def learn(self) -> None:
        """Train and test every task that is left."""
        with contextlib.ExitStack() as files:  # closed, too, if the run fails
            self.journal.open_log(files)
            files.enter_context(deterministic(self.config.deterministic))
            files.callback(self.train_source.close)
            files.callback(self.test_source.close)
            self._begin()
            first, resume = self._restore()
            self.remarks += too_slow(self.learner, self.plan, first)
            self.journal.open_scalars(self.config, files)
            self.journal.mark = self.saved_at = time.perf_counter()
            for task in self.manager.tasks[first:]:
                self._learn(task, resume)
                resume = None
                self.journal.tick()
                self.journal.task_ended(self.evaluator.test(task) | self.anytime.taken())
                if self.config.save_weights == "every" and self.processes.first:
                    save_weights(self.folder, self.learner, self.config, self.pretrained, task.index)
                self._checkpoint(end_of(task), None)
                self._renew_plan(self.state(end_of(task)))
                self.journal.say(summary(self.journal.history[-1]))

    def _begin(self):
        """Set the process up."""
        if self.processes.first and self.checkpoints:
            write_json(self.folder / "config.json", in_file(self.config.to_dict()))
        if not self.processes.agree(self.data):
            raise UnusableRun(f"{self.folder}: not all processes have the same data; give all machines the same files")
        keep_freed_memory(self.device)
        self.processes.in_all(lambda: check_device(self.learner, self.config.analyse))
        reset_peak_memory(self.device)
        where = device_name(self.device)
        if self.processes.count > 1:
            where += f", {self.processes.count} processes over {backend_of(self.device.type)}"
        self.journal.log.info("%s on %s, %s", self.folder, where, self.learner.precision.name)

    def _learn(self, task, resume):
        """Learn a task, on as many images as planned."""
        self.task = task.index
        self.journal.bar.begin(task.index)
        while self.remarks:
            self.journal.say(self.remarks.pop(0))
        try:
            shared = self.learner.plan.plain_first_task and not self.config.by_step
            if task.index == 0 and self.config.cache_first_task and shared:
                self._learn_shared(task, resume)
            else:
                self.learner.learn(task, self, resume)
        except NonFiniteGradients as error:
            raise TrainingDiverged(f"{self.journal.bar.task}: {error}") from None
        check_plan(self.plan, self.learner, task)

    def _learn_shared(self, task, resume):
        """Learn the first task, or load it if another run has trained it and this run has not started it."""
        file = self.first_task_file()
        if resume is None:
            self.first_task = file.name
        with first_task.shared(file, self.processes, self.journal.bar.say) as path:
            self.journal.tick()
            usable = not resume and not self.records.watch_epochs
            trained = self.processes.broadcast(first_task.load(path) if path and usable else None)
            self.learner.learn(task, self, resume, trained=trained and trained["learner"])
            if trained:
                self.journal.task_loaded(trained, self.learner.spent.images)
                return
            self.journal.tick()
            self.journal.note_memory(self.device)
            learned = first_task_state(self.learner)  # all processes call this together
            shares = not self.learner.plan.measures_quotas  # whose choice of exemplars moves batch norm's statistics
            if path and shares and self.first_task == file.name:
                first_task.save(path, {**self.journal.state_dict(), "learner": learned})

    def first_task_file(self) -> Path:
        """Where the first task is, or will be, before the learner has learned anything."""
        return first_task.file_of(self.config, self.dataset, self.data, self.learner)

    # ---- events reported by the learner ------------------------------------------------------------------------------

    def task_started(self, task: Task) -> None:
        self.records.task_started(task)

    def phase_started(self, task: Task, run: PhaseRun) -> None:
        self.journal.tick()
        self.journal.bar.start(run.phase.name, run.first, run.epochs, self.learner.spent.images)
        if self.resumes:
            self.resumes = False
            self.journal.resumed(run)

    def step(self, images: int) -> None:
        self.journal.bar.step(images * self.processes.count)
        if self.anytime.due():
            self.journal.tick("train_seconds")
            self.anytime.test(self.manager.tasks[self.task])
            self.journal.tick()  # testing does not count as training

    def epoch_ended(self, task: Task, run: PhaseRun, epoch: int, loss: float, accuracy: float) -> None:
        self.journal.epoch_ended(run, epoch, loss, accuracy)
        self.records.epoch_ended(task, run, epoch, loss, accuracy)
        self.journal.tick()  # recording does not count as training
        if self.journal.mark - self.saved_at >= self.pause:
            position = {"task": task.index, "phase": run.number, "epoch": epoch + 1}
            self._checkpoint(position, run.phase.optimizer.state_dict())

    def task_trained(self, task: Task) -> None:
        own = (parameter for parameter in self.learner.parameters() if id(parameter) not in self.lent)
        flags = [parameter.isfinite().all() for parameter in own]
        if flags:
            self._check(torch.stack(flags).all(), "the weights")
        self.records.task_trained(task)

    def _check(self, finite, what):
        """Raise :class:`TrainingDiverged` unless the flag ``finite``, on the device, is set in all processes.

        The loss is not enough: that of the last step is computed before its update.
        """
        self.journal.check(self.processes.all(finite), what)

    # ---- saving and resuming -----------------------------------------------------------------------------------------

    def _checkpoint(self, position, optimizer):
        if not self.checkpoints:
            return
        self.journal.tick()
        state = self.state(position, optimizer)  # all processes call this together
        if self.processes.first:
            save_state(self.folder / CHECKPOINT, state | without_pretrained(state["learner"], self.pretrained))
        seconds = self.journal.tick()  # saving does not count as training
        self.saved_at = self.journal.mark
        if self.config.checkpoint_seconds:
            self.pause = max(self.config.checkpoint_seconds, 10 * seconds)

    def state(self, position: Mapping[str, int], optimizer: State | None = None) -> State:
        """The state to resume from: tensors, numbers, strings, and lists and dicts of these.

        ``position``: the next task, phase and epoch; ``optimizer``: the optimiser's state, within a task.
        """
        self.journal.note_memory(self.device)
        return {
            **self.journal.state_dict(),
            "position": position,
            "learner": self.learner.state_dict(),
            "optimizer": optimizer,
            **arithmetic(self.learner),
            "first_task": self.first_task,
            "records": self.records.state_dict(),
            "confusion": self.evaluator.confusion,
            "anytime": self.anytime.state_dict(),
            "identity": self.config.identity(),
            "data": self.data,
        }

    def _renew_plan(self, state):
        """Plan the tasks that are left with the exemplars that there are, if their number could not be planned."""
        if self.learner.plan.measures_quotas:
            self.plan = plan_of(self.config, self.manager, state)

    def _restore(self):
        """Restore the saved state, if any; returns (index of the next task, the position in it or None)."""
        path = self.folder / CHECKPOINT
        saved = self.processes.from_first(lambda: self._read_checkpoint(path))
        state = saved or self.start
        if state is None:
            return 0, None
        if self.start and losses(state["history"])[: len(self.start["history"])] != losses(self.start["history"]):
            raise UnusableRun(f"{path}: was made from another learner; delete it to start this task again")
        if saved:
            keep_arithmetic(self.learner, saved)
            self.first_task = saved.get("first_task", "")  # 0.1.0 has none
            self.journal.log.info("resumes in %s, as it began", self.learner.precision.name)
        # copies: what training changes must not change ``start``
        noted = {name: state[name] for name in self.journal.state_dict()}
        lines = list(noted.pop("history"))  # none of which changes any more
        self.journal.load_state_dict({**copy.deepcopy(noted), "history": lines})
        self.records.load_state_dict(copy.deepcopy(state["records"]))
        self.evaluator.confusion = state["confusion"]
        if "anytime" in state:  # 0.1.0 has none
            self.anytime.load_state_dict(state["anytime"])
        self._renew_plan(state)
        position = state["position"]
        self.resumes = saved is not None
        regrow(self.learner, self.manager.tasks[: position["task"]])
        if state["optimizer"] is not None:
            return position["task"], Resume(position["phase"], position["epoch"], state["learner"], state["optimizer"])
        self.learner.load_state_dict(state["learner"])
        return position["task"], None

    def _read_checkpoint(self, path):
        saved = read_checkpoint(path, self.config, self.data)
        if saved:
            saved["learner"] = with_pretrained(saved, self.learner.new_backbone)
        return saved


def end_of(task: Task) -> dict[str, int]:
    """The position of a run after ``task``."""
    return {"task": task.index + 1, "phase": 0, "epoch": 0}


def losses(history: Sequence[Mapping[str, Json]]) -> list[list[float]]:
    """The training losses of each task, which tell learners of the same images and settings apart."""
    return [line["train_loss"] for line in history]
