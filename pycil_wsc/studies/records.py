"""Runs the analyses of one run and writes their records to ``analyses.jsonl``, one line per task."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pycil_wsc import registry
from pycil_wsc.files import write_atomically
from pycil_wsc.studies.observer import Observer

FILE = "analyses.jsonl"


class Records:
    """The observers that ``analyse`` lists, and their records: one dict per task in ``lines``.

    If a run is stopped within a task and resumes with another ``analyse``, new observers start with the next task.
    """

    def __init__(self, config: Any, learner: Any, folder: Path):
        self.learner, self.path = learner, folder / FILE
        self.observers = {name: registry.analyses[name](learner) for name in config.analyse}
        self.watching: list[str] = []
        self.lines: list[dict[str, Any]] = []

    @property
    def watch_epochs(self) -> bool:
        return any(observer.watches_epochs for observer in self.observers.values())

    def task_started(self, task: Any) -> None:
        self.watching = list(self.observers)
        self._notify("task_started", task)

    def epoch_ended(self, task: Any) -> None:
        self._notify("epoch_ended", task)

    def task_trained(self, task: Any) -> None:
        """Append the task's line to the file."""
        if recorded := self._notify("task_trained", task):
            self.lines.append({"task": task.index, "share_new": Observer(self.learner).share_of_new(task)} | recorded)
            if self.learner.processes.first:
                write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def _notify(self, event: str, task: Any) -> dict[str, Any]:
        if not self.watching:
            return {}
        with undisturbed(self.learner):
            return {name: getattr(self.observers[name], event)(task) for name in self.watching}

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines, "observers": {name: self.observers[name].state for name in self.watching}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = state["lines"]
        self.watching = [name for name in self.observers if name in state["observers"]]
        for name in self.watching:
            self.observers[name].state = state["observers"][name]


def unrecorded(config: Any) -> list[str]:
    """The analyses that ``analyse`` lists but a finished run did not record for its last task."""
    try:
        recorded = json.loads((config.run_folder / FILE).read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        recorded = {}
    return [name for name in config.analyse if name not in recorded]


@contextlib.contextmanager
def undisturbed(learner: Any) -> Iterator[None]:
    """Evaluation mode within the context; restores the modules' modes and torch's global generator afterwards."""
    modes = [(module, module.training) for module in learner.modules()]
    with torch.random.fork_rng(devices=[]):
        learner.eval()
        yield
    for module, mode in modes:
        module.training = mode
