"""Many runs: finished ones are skipped, stopped ones resumed, and a failed one stops no other."""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import Timeout

from pycil_wsc import devices, registry, report
from pycil_wsc.engine.processes import announcements
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import REPLACED, locked
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt, finished
from pycil_wsc.launch.overview import Overview
from pycil_wsc.launch.status import has_result
from pycil_wsc.launch.workers import run_in_processes
from pycil_wsc.runs import first_task
from pycil_wsc.runs.progress import duration


def sweep(
    configs: Sequence[Any],
    workers: int | None = None,
    ray: str | None = None,
    redo: bool = False,
    gpus_per_run: int | None = None,
) -> int:
    """Complete every run and print the table of results.

    With ``redo`` those that are finished are done again (:func:`set_aside`), once it is known that they can be.
    ``workers`` runs are trained at a time, each in its own process; with ``ray`` (the address of a cluster, or "" to
    look for one) that many on each GPU of the cluster, or on each node without a GPU. With ``gpus_per_run`` each run
    has that many GPUs of one node of the cluster, and a process for each. Returns the exit code: 0, 1 if a run failed,
    130 if stopped by Ctrl-C.
    """
    check(configs, workers, ray, gpus_per_run)
    schedule = Schedule(configs, redo)
    try:
        if ray is not None:
            from pycil_wsc.launch.ray_cluster import run_on_cluster  # Ray is an extra

            run_on_cluster(schedule, ray, workers or 1, gpus_per_run or 1)
        else:
            schedule.start()
            if workers is not None and workers > 1:
                run_in_processes(schedule, workers)
            else:
                run_here(schedule)
    except KeyboardInterrupt:
        schedule.overview.close()
        print(
            f"\nstopped with {len(schedule.results)} of {len(configs)} runs done; the same command"
            f"{' without --redo' if redo else ''} resumes from here",
            file=sys.stderr,
        )
        return 130
    finally:
        schedule.overview.close()
    return finish(configs, schedule.results, schedule.failures)


def check(configs: Sequence[Any], workers: int | None, ray: str | None, gpus_per_run: int | None = None) -> None:
    """Raise a :class:`UserError` for what is not possible on this machine."""
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: must be at least 1")
    if gpus_per_run is not None:
        check_gpus_per_run(configs, workers, ray, gpus_per_run)
    if ray is None:  # whose nodes may have GPUs and packages that this machine lacks
        for key, package in (("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases")):
            if any(getattr(config, key, False) for config in configs) and importlib.util.find_spec(key) is None:
                raise UserError(f"{key}: {package} is not installed; pip install {key}, or set the key to false")
        for device in dict.fromkeys(config.device for config in configs):
            devices.resolved_device(device)


def check_gpus_per_run(configs: Sequence[Any], workers: int | None, ray: str | None, count: int) -> None:
    """Raise a :class:`UserError` unless each run can have ``count`` GPUs of a Ray cluster."""
    if count < 1:
        raise UserError(f"--gpus-per-run {count}: must be at least 1")
    if ray is None:
        raise UserError(
            f"--gpus-per-run {count}: needs --ray; without Ray, torchrun --nproc-per-node {count} main.py ... trains "
            "one run after another on as many GPUs"
        )
    if count > 1 and (workers or 1) > 1:
        raise UserError(
            f"--workers {workers}: runs cannot share GPUs with --gpus-per-run {count}; leave one of the two out"
        )
    for config in configs:
        kind_of(config).check_processes(config, count)


def set_aside(configs: Sequence[Any]) -> None:
    """Set aside the result of every finished run, so that it is repeated: ``result.json`` becomes ``result.old.json``.

    Its other records are removed, which would be taken for those of the new run. No run reuses an existing first task;
    runs that share one train it once. A run that another process is working on is left alone.

    Raises a :class:`UserError` if a folder is write-protected, before any is changed.
    """
    for config in configs:
        if config.run_folder.exists() and not os.access(config.run_folder, os.W_OK | os.X_OK):
            raise UserError(f"--redo: {config.run_folder} is write-protected; make it writable")
    for config in configs:
        folder = config.run_folder
        try:
            with contextlib.suppress(Timeout), locked(folder, wait=False):
                first_task.ignore_older(folder)
                if has_result(folder):  # first the checkpoint, from which the run would resume at its end
                    kind = kind_of(config)
                    (folder / kind.checkpoint).unlink(missing_ok=True)
                    for path in [path for pattern in kind.records for path in folder.glob(pattern)]:
                        remove(path)
                    os.replace(folder / "result.json", folder / REPLACED)
        except OSError as error:
            raise UserError(f"--redo: {folder} cannot be changed ({error}); make it writable") from None


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def is_finished(config: Any) -> bool:
    """Whether the folder of a run has its result, and not that of a shorter run."""
    return has_result(config.run_folder) and not kind_of(config).extends(config)


def run_here(schedule: "Schedule") -> None:
    """One run after another in this process, and in those that ``torchrun`` started with it.

    After a failure on an accelerator a new process executes the rest, because its error may have corrupted this one.
    """
    while job := schedule.next():
        outcome = attempt(job, schedule.data, partial(schedule.overview.progress, job))
        if outcome.again and announcements().count > 1:  # the others wait for this process; torchrun ends them
            raise SystemExit(f"{job.config.run_folder}: {outcome.failure}")
        schedule.ended(job, outcome)
        if outcome.failure and devices.used() and announcements().count == 1:
            return run_in_processes(schedule, 1)


def finish(configs: Sequence[Any], results: Mapping[Path, Any], failures: Mapping[Path, str]) -> int:
    """Print the table, write the reports and list the failures; ``results`` and ``failures`` are by run folder.

    Returns the exit code.
    """
    if results:
        print(
            "\n" + report.result_table(results[config.run_folder] for config in configs if config.run_folder in results)
        )
    for folder in dict.fromkeys(str(Path(config.out, config.prefix)) for config in configs):
        print(f"\nResults: {folder}")
        if results:
            write_report(folder)
    for folder, reason in failures.items():
        print(f"failed: {folder}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def write_report(folder: str) -> None:
    """Write the report of all runs in ``folder``, those of other commands included. An error costs no result."""
    try:
        print(f"Report: {report.write_report(folder)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:  # a defect of the report costs the finished runs nothing
        print(f"error: the report of {folder} failed: {type(error).__name__}: {error}", file=sys.stderr)


class Schedule:
    """The queue of runs, with ``results`` and the reasons of ``failures`` by run folder.

    New runs come first, in their order; then failed ones, once more; then those that another process was working on.
    The queue is empty until :meth:`start`. Before, each run's data and model are checked, and no file is changed.

    Args:
        configs: the configurations.
        redo: do finished runs again.

    Raises:
        UserError: a run cannot be trained, as with a wrong path.
    """

    def __init__(self, configs: Sequence[Any], redo: bool = False) -> None:
        self.data, self.results, self.failures = Datasets(), {}, {}
        self.fresh, self.retries, self.locked_elsewhere = deque(), deque(), deque()
        self.overview = Overview()
        self.jobs = [Job(number, len(configs), config) for number, config in enumerate(configs, 1)]
        self.redo = redo
        for job in self.jobs:
            self.overview.add(job, kind_of(job.config).plan(job.config, self.data.of(job.config)))
        for job in self.jobs:
            if redo or not is_finished(job.config):
                kind_of(job.config).check_model(job.config, self.data.of(job.config))

    def start(self) -> None:
        """Queue the runs that are not finished."""
        if self.redo:
            set_aside([job.config for job in self.jobs])
        for job in self.jobs:
            if is_finished(job.config):
                self._skip(job)
            else:
                self.fresh.append(job)
        if self.results:
            self.overview.say(f"{len(self.results)} of {len(self.jobs)} runs finished before")

    def next(self) -> Job | None:
        """The next job, or None if there is none at present: a run in progress may fail and come back."""
        queue = self.fresh or self.retries or self.locked_elsewhere
        return queue.popleft() if queue else None

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Record the end of an attempt."""
        folder = job.config.run_folder
        if outcome.error:
            raise UserError(outcome.error)
        if outcome.result:
            self.results[folder] = outcome.result
            self.overview.ended(job, "done", kind_of(job.config).headline(outcome.result))
        elif not outcome.failure:
            self.locked_elsewhere.append(replace(job, wait=True))
            self.overview.ended(job, "waiting", "another process is working on it")
        elif outcome.again and job.attempt == 1:
            self.retries.append(replace(job, attempt=2))
            self.overview.ended(job, "retry", f"FAILED: {outcome.failure}; will be tried once more")
        else:
            self.failures[folder] = outcome.failure
            self.overview.ended(job, "failed", f"FAILED: {outcome.failure}")

    def _skip(self, job: Job) -> None:
        outcome = attempt(job, self.data, None)
        if outcome.result:
            self.results[job.config.run_folder] = outcome.result
            self.overview.skip(job)
            if lacking := kind_of(job.config).unrecorded(job.config):
                self.overview.say(f"{job.title}: finished without recording {', '.join(lacking)}; --redo runs it again")
        else:
            self.ended(job, outcome)


def kind_of(config: Any) -> registry.Kind:
    """The kind of a run."""
    return registry.kinds[config.kind]


def dry_run(
    configs: Sequence[Any],
    workers: int | None = None,
    ray: str | None = None,
    measured: bool = False,
    gpus_per_run: int | None = None,
) -> int:
    """Print the runs and what each costs in training images, or tokens. Raises the same errors as :func:`sweep`.

    ``measured``: also in hours of training on this machine, from a few steps of each method and phase. Returns the exit
    code: 0, or 1 if a run will fail.
    """
    check(configs, workers, ray, gpus_per_run)
    data, total, left, unusable = Datasets(), Counter(), 0.0, 0
    measurers = {name: registry.kinds[name].measurer() for name in {c.kind for c in configs}} if measured else {}
    for config in configs:
        kind, dataset = kind_of(config), data.of(config)
        cost, done = kind.plan(config, dataset), is_finished(config)
        if not done:
            kind.check_model(config, dataset)
        total[kind.unit] += 0 if done else cost
        line = f"{config.run_folder}  {cost:,} {kind.unit}"
        try:
            if done:
                finished(config, dataset)  # raises if the run would not accept the result
            elif measured:
                seconds = measurers[config.kind](config, dataset)
                left, line = left + seconds, f"{line}, {duration(seconds)} of training"
        except UnusableRun as error:
            unusable, line = unusable + 1, f"{line}, will fail: {error}"
        print(line + "  (finished)" * done)
    print(f"{len(configs)} runs, {' and '.join(f'{cost:,} training {unit}' for unit, cost in total.items())} to go")
    if measured:
        print(f"{left / 3600:,.2f} hours of training on this machine, one run after another")
    return 1 if unusable else 0
