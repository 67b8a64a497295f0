"""What the launchers know of a kind of run: of class-incremental learning, or of language models."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from pycil_wsc.config.forms import C
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.runs.progress import Progress

D = TypeVar("D")  # the data of a run


class Kind(Generic[C, D]):
    """A kind of run. What it says of its configurations is a :class:`pycil_wsc.config.forms.Form`."""

    unit: str  # the unit of a run's cost
    records: tuple[str, ...]  # patterns of what a run writes beside result and log; first what it resumes from

    def loader(self) -> Callable[[C], D]:
        """A function from a configuration to the data of its run, which reads shared data only once."""
        raise NotImplementedError

    def plan(self, config: C, data: D) -> int:
        """The cost of a whole run, in ``unit``."""
        raise NotImplementedError

    def budget(self, config: C, data: D) -> str:
        """What decides about a run's length in the place of :meth:`plan`, in words; empty without a budget."""
        return ""

    def outline(self, config: C, data: D) -> str:
        """The tasks, in a line; runs with the same tasks have the same line."""
        return ""

    def memory(self, config: C, data: D) -> int | None:
        """The exemplars that a run will keep after its last task; None if the method keeps none, or is not counted."""

    def remarks(self, config: C, data: D) -> list[str]:
        """Settings without effect, or with one that may surprise, a line each."""
        return []

    def measurer(self) -> Callable[[C, D], float]:
        """A function that estimates the training time on this machine, in seconds, from a configuration and its data.

        It measures a few steps of each phase; runs whose steps take equally long share a measurement. Testing, the
        choice of exemplars, resets and saving are not included.
        """
        raise UserError(f"--measure: training on {self.unit} cannot be measured yet; leave it out")

    def execute(self, config: C, data: D, on_progress: Callable[[Progress], None]) -> dict[str, Json]:
        """Execute a run, resuming it if it was stopped; returns the contents of its ``result.json``.

        Raises:
            UnusableRun, TrainingDiverged, WrongPlan: this run fails and is not tried again; the others continue.
            UserError: none of the runs can work; the sweep ends.
            Exception: any other; the run is tried once more.
        """
        raise NotImplementedError

    def headline(self, result: Mapping[str, Json]) -> str:
        """A short summary of a finished run."""
        raise NotImplementedError

    def leftovers(self, config: C) -> tuple[str, ...]:
        """Files and folders that a finished run no longer needs."""
        return self.records[:1]

    def unrecorded(self, config: C) -> list[str]:
        """Records that ``config`` requests but the finished run does not have."""
        return []

    def check_model(self, config: C, data: D) -> None:
        """Raise a :class:`UserError`, before a sweep starts, if the model cannot be built or trained as configured."""

    def check_processes(self, config: C, count: int) -> None:
        """Raise a :class:`UserError` if ``count`` processes cannot share the run of ``config``."""
