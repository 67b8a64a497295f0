"""Many runs: finished ones are skipped, stopped ones resumed, and a failed one stops no other."""

import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pycil_wsc import devices
from pycil_wsc.config.kinds import kind_of, kinds, run_folder
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import UnusableRun, Unwritable, UserError, described
from pycil_wsc.launch.attempt import Job, attempt, finished, record_failure
from pycil_wsc.launch.schedule import Schedule
from pycil_wsc.launch.workers import Workers
from pycil_wsc.reproducibility import kept_commit
from pycil_wsc.runs.progress import duration
from pycil_wsc.training.processes import launched, rank_and_count


class Where(NamedTuple):
    """Where runs are trained."""

    workers: int | None = None  # runs at a time on this machine, or on each GPU, or node without GPUs, of a cluster
    ray: str | None = None  # the address of a Ray cluster, or "" to look for one or start one
    gpus_per_run: int | None = None  # of this machine or of one node of the cluster, with a process for each

    def check(self, configs: Sequence[RunConfig]) -> None:
        """Raise a :class:`UserError` for what is not possible on this machine."""
        workers = self.workers
        gpus = self.gpus_per_run
        for option, number in (("--workers", workers), ("--gpus-per-run", gpus)):
            if number is not None and number < 1:
                raise UserError(f"{option} {number}: must be at least 1")
        if (gpus or 1) > 1 and (workers or 1) > 1:
            raise UserError(
                f"--workers {workers}: runs cannot share GPUs with --gpus-per-run {gpus}; leave one of the two out"
            )
        for config in configs:
            kind_of(config).check_processes(config, gpus or 1)
        if self.ray is not None:  # its nodes may have GPUs and packages that this machine lacks
            return
        for key, package in (("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases")):
            if any(getattr(config, key, False) for config in configs) and importlib.util.find_spec(key) is None:
                raise UserError(f"{key}: {package} is not installed; pip install {key}, or set the key to false")
        for name in sorted({config.device for config in configs}):
            if devices.resolved_device(name).type != "cpu" and (gpus or 1) > devices.count():
                raise UserError(
                    f"--gpus-per-run {gpus}: this machine has {devices.count()} GPUs; use at most that many"
                )


HERE = Where()


def sweep(configs: Sequence[RunConfig], where: Where = HERE, redo: bool = False) -> int:
    """Complete every run and print the table of results.

    With ``redo`` those that are finished are done again, once it is known that they can be. Returns the exit code: 0,
    1 if a run failed, 130 if stopped by Ctrl-C.
    """
    where.check(configs)
    schedule = Schedule(configs, redo)
    try:
        with contextlib.closing(schedule.overview), kept_commit():
            launch(schedule, where)
    except KeyboardInterrupt:
        done = sum(job.state == "done" for job in schedule.jobs)
        again = " without --redo" if redo and not schedule.redo else ""
        line = f"\nstopped with {done} of {len(configs)} runs done; the same command{again} resumes from here"
        print(line, file=sys.stderr)
        return 130
    return finish(schedule.jobs)


def launch(schedule: Schedule, where: Where) -> None:
    """Execute the runs of ``schedule``."""
    workers, processes = where.workers or 1, where.gpus_per_run or 1
    launcher = None
    if where.ray is not None:
        from pycil_wsc.launch.ray_cluster import Cluster  # Ray is an extra

        launcher = Cluster(where.ray, workers, processes)
    elif workers > 1 or processes > 1:
        launcher = Workers(min(workers, len(schedule.jobs)), processes)
    schedule.start()
    if launcher:
        schedule.complete(launcher)
    else:
        run_here(schedule)


def run_here(schedule: Schedule) -> None:
    """One run after another in this process, and in those that ``torchrun`` started with it.

    After a failure on an accelerator a new process executes the rest, because its error may have corrupted this one.
    """
    while job := schedule.next():
        outcome = attempt(job, schedule.data, partial(schedule.overview.progress, job))
        if outcome.again and rank_and_count()[1] > 1:  # the others wait for this process; torchrun ends them
            record_failure(job, outcome)
            raise SystemExit(f"{run_folder(job.config)}: {outcome.failure}")
        schedule.ended(job, outcome)
        if outcome.failure and devices.used() and not launched():
            devices.release_memory()
            schedule.complete(Workers(1))


def finish(jobs: Sequence[Job]) -> int:
    """Print the table, write the reports and list the failures; returns the exit code."""
    from pycil_wsc import report  # imported late: it needs pandas, and planning does not

    results = [job.result for job in jobs if job.result]
    failed = [job for job in jobs if job.failure]
    if results:
        print(f"\n{report.result_table(results)}")
    for folder in dict.fromkeys(str(Path(job.config.out, job.config.prefix)) for job in jobs):
        print(f"\nResults: {folder}")
        if results:
            write_report(folder)
    for job in failed:
        print(f"failed: {run_folder(job.config)}: {job.failure}", file=sys.stderr)
    return 1 if failed else 0


def write_report(folder: str) -> None:
    """Write the report of all runs in ``folder``, those of other commands included. An error costs no result."""
    from pycil_wsc import report

    try:
        print(f"Report: {report.write_report(folder)}")
    except Exception as error:  # a defect of the report costs the finished runs nothing
        reason = error if isinstance(error, UserError) else f"the report of {folder} failed: {described(error)}"
        if isinstance(error, Unwritable):
            reason = f"{str(error).partition(';')[0]}; python -m pycil_wsc.report {folder} --out DIR writes it"
        print(f"error: {reason}", file=sys.stderr)


def dry_run(configs: Sequence[RunConfig], where: Where = HERE, measured: bool = False) -> int:
    """Print the tasks, the runs and what each costs in training images, or tokens, and how many exemplars it keeps.

    ``measured``: also in hours of training on this machine, from a few steps of each method and phase. Raises the same
    errors as :func:`sweep`. Returns the exit code: 0, or 1 if a run will fail.
    """
    where.check(configs)
    schedule = Schedule(configs)
    measurers = {name: kinds[name].measurer() for name in {config.kind for config in configs}} if measured else {}
    to_go: Counter[str] = Counter()  # by unit
    remarks: Counter[str] = Counter()  # how many runs have each
    outlines: set[str] = set()
    left = 0.0
    unusable = budgeted = 0
    for job in schedule.jobs:
        config = job.config
        dataset = schedule.data.of(config)
        kind = kind_of(config)
        outline = kind.outline(config, dataset)
        if outline and outline not in outlines:
            outlines.add(outline)
            print(outline)
        remarks.update(kind.remarks(config, dataset))
        budget = kind.budget(config, dataset)
        line = _cost(job, budget, kind.memory(config, dataset))
        done = job.state == "done"
        if budget and not done:
            budgeted += 1
        planned = 0 if budget or done else job.planned
        to_go[kind.unit] += planned  # also of 0: the last line names each unit
        try:
            if done:
                finished(config, schedule.data)  # raises if the run would not accept the result
            elif measured:
                seconds = measurers[config.kind](config, dataset)
                left += seconds
                line += f", {duration(seconds)} of training"
        except UnusableRun as error:
            unusable += 1
            line += f", will fail: {error}"
        print(f"{line}  (finished)" if done else line)
    for remark, count in remarks.items():
        print(f"{_runs(count)}: {remark}")
    costs = " and ".join(f"{cost:,} training {unit}" for unit, cost in to_go.items())
    beside = f", and {_runs(budgeted)} limited by a budget" if budgeted else ""
    print(f"{_runs(len(configs))}, {costs} to go{beside}")
    if measured:
        print(f"{left / 3600:,.2f} hours of training on this machine, one run after another")
    return 1 if unusable else 0


def _cost(job: Job, budget: str, memory: int | None) -> str:
    """A run's folder, its cost, and the exemplars that it keeps."""
    kept = "" if memory is None else f", {memory:,} in memory"
    return f"{run_folder(job.config)}  " + (budget or f"{job.planned:,} {kind_of(job.config).unit}") + kept


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"
