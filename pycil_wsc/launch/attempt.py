"""A run of a sweep, and one attempt at it, in this process, a worker process or on a cluster node."""

import contextlib
import functools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from filelock import Timeout

from pycil_wsc import devices
from pycil_wsc.allocator import return_freed_memory
from pycil_wsc.config.kinds import kind_of, kinds, run_folder
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.data.images.fingerprint import changed
from pycil_wsc.errors import (
    TrainingDiverged,
    UnusableRun,
    Unwritable,
    UserError,
    WrongPlan,
    described,
    lack_of_memory,
    raised_at,
)
from pycil_wsc.files import Json, locked, remove, write_json
from pycil_wsc.launch.status import FAILURE, RECORD, recorded
from pycil_wsc.llm.kind import LanguageModel  # noqa: F401  # registers it
from pycil_wsc.reproducibility import commit
from pycil_wsc.results import RESULT, finished_result
from pycil_wsc.runs.class_incremental import ClassIncrementalRuns  # noqa: F401  # registers it
from pycil_wsc.runs.progress import Progress, log_file
from pycil_wsc.training.processes import from_first, in_all, rank_and_count

TRACEBACK_LINES = 20  # in failed.json


@dataclass(eq=False)
class Job:
    """Run ``number`` of the ``total`` runs of a sweep, and how far it is.

    ``planned`` and ``images``: the images (or tokens) to process in all, and those that were processed so far.
    ``state``: waiting, running, done, failed, or retry: failed, but will be tried once more. ``wait``: another process
    was working on the run, so the next attempt waits for it instead of giving up.
    """

    number: int
    total: int
    config: RunConfig
    planned: int = 0
    images: int = 0
    state: str = "waiting"
    attempt: int = 1
    wait: bool = False
    result: dict[str, Json] | None = None
    failure: str = ""

    @property
    def title(self) -> str:
        """The run's name in the overview."""
        folder = run_folder(self.config)
        return f"[{self.number}/{self.total}] {self.config.method} {folder.parent.name} seed {self.config.seed}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt: a ``result``, the reason of a ``failure``, or an ``error`` that affects every run.

    All three are empty if another process is working on the run.
    """

    result: dict[str, Json] | None = None
    failure: str = ""
    again: bool = False  # another attempt may succeed
    error: str = ""
    trace: str = ""  # the traceback of the failure


class Datasets:
    """The data of runs of all kinds, read once and shared by the runs that use them."""

    def __init__(self) -> None:
        self._loader = functools.cache(lambda kind: kinds[kind].loader())

    def forget(self) -> None:
        """Free the data, which a process that only plans runs no longer needs."""
        self._loader.cache_clear()
        return_freed_memory()

    def of(self, config: RunConfig) -> Any:
        """The data of the run with this ``config``."""
        return self._loader(config.kind)(config)


def attempt(job: Job, data: Datasets, on_progress: Callable[[Progress], None]) -> Outcome:
    """Execute a run. One process at a time works in a run's folder; a finished run is not trained again."""
    config = job.config
    folder = run_folder(config)
    try:
        with locked(folder, wait=job.wait):
            result = finished(config, data)
            if not result:
                devices.release_memory()
                (folder / FAILURE).unlink(missing_ok=True)  # left by an earlier attempt
                result = execute(from_first(config), data, recorded(on_progress, folder, job.planned))
            remove_unfinished(config)
        return Outcome(result=result)
    except Timeout:
        return Outcome()
    except (TrainingDiverged, WrongPlan, UnusableRun) as error:
        return Outcome(failure=str(error))
    except UserError as error:
        # of several processes, only this one may have met it: it must not go on to the next run alone
        if isinstance(error, Unwritable) or rank_and_count()[1] > 1:
            return Outcome(error=str(error))
        return Outcome(failure=str(error))
    except (Exception, SystemExit) as error:  # code of other packages may end the program
        trace = "".join(traceback.format_exception(error))
        problem = lack_of_memory(error) if devices.out_of_memory(error) else described(error)
        where = raised_at(error)
        reason = f"{problem}, raised at {where}" if where else problem
        return Outcome(failure=f"{reason} (traceback in log.txt)", again=True, trace=trace)


def execute(config: RunConfig, data: Datasets, on_progress: Callable[[Progress], None]) -> dict[str, Json]:
    """Train and test the run in all processes, each of which calls this; returns its result."""
    dataset = in_all(lambda: data.of(config))
    return kind_of(config).execute(config, dataset, on_progress)


def record_failure(job: Job, outcome: Outcome) -> None:
    """Write a failed attempt to ``failed.json`` and to the log. Raises a :class:`UserError` if that is not possible."""
    folder = run_folder(job.config)
    record = {"reason": outcome.failure, "traceback": outcome.trace.splitlines()[-TRACEBACK_LINES:]}
    record |= {"attempt": job.attempt, "time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": commit()}
    with log_file(folder) as log:
        log.error("attempt %d failed: %s\n%s", job.attempt, outcome.failure, outcome.trace)
    write_json(folder / FAILURE, record)


def remove_unfinished(config: RunConfig) -> None:
    """Remove what only an unfinished run has: a process that is killed right after writing its result leaves it."""
    for name in (FAILURE, RECORD, *kind_of(config).leftovers(config)):
        with contextlib.suppress(OSError):  # it costs space, but no result
            remove(run_folder(config) / name)


def finished(config: RunConfig, data: Datasets) -> dict[str, Json] | None:
    """The ``result.json`` of a finished run, or None. Those of 0.1.0 without a fingerprint are accepted.

    Raises :class:`UnusableRun` if it is incomplete, or was made with another configuration or other data.
    """
    result, now = finished_result(config), getattr(data.of(config), "fingerprint", None)
    if result and (difference := changed(result.get("data"), now)):
        raise UnusableRun(f"{run_folder(config) / RESULT}: was made with other data ({difference}); move it away")
    return result
