"""Runs the analyses of one run and writes their records to ``analyses.jsonl``, one line per task."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycil_wsc import registry
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.files import read_file, write_atomically
from pycil_wsc.seeding import restored
from pycil_wsc.state import State
from pycil_wsc.studies.observer import Observed, Observer, Record
from pycil_wsc.training.phase import Monitor, PhaseRun

FILE = "analyses.jsonl"


class Records(Monitor):
    """The observers of the ``analyses``, and their records: one dict per task in ``lines``.

    If a run is stopped within a task and resumes with other ``analyses``, new observers start with the next task.
    """

    def __init__(self, analyses: Sequence[str], learner: Observed, folder: Path):
        self.learner = learner
        self.path = folder / FILE
        self.observers = {name: registry.analyses[name](learner) for name in analyses}
        self.watching: list[str] = []
        self.lines: list[Record] = []

    @property
    def watch_epochs(self) -> bool:
        return any(observer.watches_epochs for observer in self.observers.values())

    def task_started(self, task: Task) -> None:
        self.watching = list(self.observers)
        self._notify("task_started", task)

    def epoch_ended(self, task: Task, run: PhaseRun, epoch: int, loss: float, accuracy: float) -> None:
        self._notify("epoch_ended", task)

    def task_trained(self, task: Task) -> None:
        """Append the task's line to the file."""
        recorded = self._notify("task_trained", task)
        if recorded:
            self.lines.append({"task": task.index, "share_new": Observer(self.learner).share_of_new(task)} | recorded)
            if self.learner.processes.first:
                write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def _notify(self, event: str, task: Task) -> Record:
        if not self.watching:
            return {}
        with undisturbed(self.learner):
            return {name: getattr(self.observers[name], event)(task) for name in self.watching}

    def state_dict(self) -> State:
        return {"lines": self.lines, "observers": {name: self.observers[name].state for name in self.watching}}

    def load_state_dict(self, state: State) -> None:
        self.lines = state["lines"]
        self.watching = [name for name in self.observers if name in state["observers"]]
        for name in self.watching:
            self.observers[name].state = state["observers"][name]


def unrecorded(analyses: Sequence[str], folder: Path) -> list[str]:
    """Those of the ``analyses`` that the finished run in ``folder`` did not record for each of its tasks."""
    try:
        lines = [json.loads(line) for line in read_file(folder / FILE).decode().splitlines()]
        tasks = lines[-1]["task"] + 1
    except (OSError, ValueError, LookupError, TypeError):
        lines = []
        tasks = 1
    return [name for name in analyses if len([line for line in lines if name in line]) < tasks]


@contextlib.contextmanager
def undisturbed(learner: Observed) -> Iterator[None]:
    """Evaluation mode within the context; restores the modules' modes and torch's global generator afterwards."""
    modes = [(module, module.training) for module in learner.modules()]
    with restored([]):
        learner.eval()
        yield
    for module, mode in modes:
        module.training = mode
