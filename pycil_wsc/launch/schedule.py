"""The queue of a sweep's runs: finished ones are skipped, stopped ones resumed, failed ones tried once more."""

import contextlib
import heapq
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from filelock import Timeout

from pycil_wsc.config.kinds import kind_of, run_folder
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import OtherSettings, UnusableRun, Unwritable, UserError
from pycil_wsc.files import locked
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, finished, record_failure, remove_unfinished
from pycil_wsc.launch.overview import Overview
from pycil_wsc.output import watched
from pycil_wsc.results import finished_result, has_result, is_finished, set_result_aside
from pycil_wsc.runs.progress import Progress

if TYPE_CHECKING:
    from pycil_wsc.launch.ray_cluster import Cluster
    from pycil_wsc.launch.workers import Workers

FRESH, AGAIN, ELSEWHERE = range(3)  # places in the queue


class Schedule:
    """The runs of a sweep as ``jobs``, and the queue of those to be done.

    New runs come first, in their order; then failed ones, once more; then those that another process was working on.
    The queue is empty until :meth:`start`. Before, each run's data and model are checked, and no file is changed.

    Args:
        configs: the configurations.
        redo: do finished runs again; False once their results are set aside.

    Raises:
        UserError: a run cannot be trained, as with a wrong path.
    """

    def __init__(self, configs: Sequence[RunConfig], redo: bool = False) -> None:
        self.data = Datasets()
        self.redo = redo
        self.queue: list[tuple[int, int]] = []  # a heap of places, each with the number of a job
        self.jobs: list[Job] = []
        for number, config in enumerate(watched(configs, len(configs), "planning"), 1):
            kind = kind_of(config)
            data = self.data.of(config)
            job = Job(number, len(configs), config, kind.plan(config, data))
            self.jobs.append(job)
            if is_finished(config) and not redo:
                job.state = "done"
            else:
                kind.check_model(config, data)
        self.overview = Overview(self.jobs)

    def start(self) -> None:
        """Queue the runs that are not finished, and take the results of the others."""
        if self.redo:
            set_aside([job.config for job in self.jobs])
            self.redo = False
        for job in self.jobs:
            if job.state == "done":
                self._take_result(job)
            else:
                self._put(FRESH, job)
        done = len([job for job in self.jobs if job.state == "done"])
        if done:
            self.overview.say(f"{done} of {len(self.jobs)} runs finished before")

    def _take_result(self, job: Job) -> None:
        try:
            job.result = finished(job.config, self.data)
        except UnusableRun as error:
            self.ended(job, Outcome(failure=str(error)))
            return
        if job.result is None:  # another command repeats the run
            job.state = "waiting"
            return self._put(FRESH, job)
        with contextlib.suppress(Timeout, Unwritable), locked(run_folder(job.config), wait=False):
            remove_unfinished(job.config)
        job.planned = 0  # this command has nothing left to do
        lacking = kind_of(job.config).unrecorded(job.config)
        if lacking:
            self.overview.say(f"{job.title}: finished without recording {', '.join(lacking)}; --redo runs it again")

    def _put(self, place: int, job: Job) -> None:
        heapq.heappush(self.queue, (place, job.number))

    def next(self) -> Job | None:
        """The next job, or None if there is none at present: a run in progress may fail and come back."""
        if not self.queue:
            return None
        _, number = heapq.heappop(self.queue)
        return self.jobs[number - 1]

    def complete(self, launcher: "Workers | Cluster") -> None:
        """Execute the runs with ``launcher``."""
        self.data.forget()
        try:
            while True:
                while launcher.slots and (job := self.next()):
                    launcher.start(job)
                if not launcher.running:
                    return
                for job, message in launcher.messages():
                    if isinstance(message, Progress):
                        self.overview.progress(job, message)
                    else:
                        self.ended(job, message)
        finally:
            launcher.stop()

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Record the end of an attempt."""
        if outcome.error:
            raise UserError(outcome.error)
        if outcome.result:
            job.result = outcome.result
            self.overview.ended(job, "done", kind_of(job.config).headline(outcome.result))
            return
        if not outcome.failure:
            job.wait = True
            self._put(ELSEWHERE, job)
            self.overview.ended(job, "waiting", "another process is working on it")
            return
        record_failure(job, outcome)
        if outcome.again and job.attempt == 1:
            job.attempt = 2
            self._put(AGAIN, job)
            self.overview.ended(job, "retry", f"FAILED: {outcome.failure}; will be tried once more")
        else:
            job.failure = outcome.failure
            self.overview.ended(job, "failed", f"FAILED: {outcome.failure}")


def set_aside(configs: Sequence[RunConfig]) -> None:
    """Set aside the result of every finished run, so that it is repeated: ``result.json`` becomes ``result.old.json``.

    Its other records are removed, which would be taken for those of the new run. A shared first task stays: all that
    decides it, the code included, is part of its name. A run that another process is working on is left alone.

    Raises a :class:`UserError` if a folder is write-protected or has another run's result, before any is changed.
    """
    folders = {run_folder(config): config for config in configs}
    for folder in folders:
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"--redo: {folder} is write-protected; make it writable")
        try:
            finished_result(folders[folder])
        except OtherSettings as error:
            raise UserError(f"--redo: {error}") from None
        except UnusableRun:
            pass  # one that cannot be read is the run's own
    for folder, config in folders.items():
        try:
            with contextlib.suppress(Timeout), locked(folder, wait=False):
                if has_result(folder):
                    set_result_aside(folder, kind_of(config).records)
        except OSError as error:
            raise UserError(f"--redo: {folder} cannot be changed ({error}); make it writable") from None
