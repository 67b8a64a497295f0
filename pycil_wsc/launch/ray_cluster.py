"""Runs on a Ray cluster. Ray decides where and when, and restarts a run whose node died."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycil_wsc.config.image_config import in_file
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.files import Json, write_json
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt, remove_unfinished
from pycil_wsc.launch.workers import attempt_in_processes
from pycil_wsc.reproducibility import commit
from pycil_wsc.results import RESULT, is_finished
from pycil_wsc.runs.progress import Progress

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.queue import Queue

NODE_DEATHS = 5  # failures of its node after which a run is still restarted
ANSWER_SECONDS = 10  # for a cluster's first answer


def connect(address: str) -> Any:
    """The ``ray`` module, connected to the cluster at ``address``, to one found here, or to one started here."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else it looks for minutes where no cluster is
    try:
        import ray
        import ray.util.queue
    except ImportError:
        raise UserError("--ray needs Ray, which is not installed: pip install -r requirements-cluster.txt") from None
    package = Path(__file__).parent.parent
    on_sigterm = signal.getsignal(signal.SIGTERM)
    environment = {"py_modules": [str(package)], "env_vars": {"PYCIL_WSC_COMMIT": commit() or ""}}
    try:
        if ":" in address:  # Ray itself would try for long even where nothing listens
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        ray.init(address=address or None, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"--ray{address and f' {address}'}: no cluster there ({first_line(error)}); "
            "give the address that 'ray start' printed"
        ) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in place
    return ray


class Cluster:
    """Executes runs on the cluster at ``address``, ``per_device`` at a time on each GPU, or on each node without GPUs.

    With ``processes`` above 1, each run is trained by that many processes on as many GPUs of one node.
    """

    slots = (None,)  # always one free: Ray has a queue of its own

    def __init__(self, address: str, per_device: int, processes: int = 1) -> None:
        self.ray = ray = connect(address)
        self.processes = processes
        self.running: dict[ObjectRef[Outcome], Job] = {}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        try:
            self.shares = shares(nodes, per_device, processes)
        except UserError:
            ray.shutdown()
            raise
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}
        self.progress: Queue = ray.util.queue.Queue(actor_options=options)

    def start(self, job: Job) -> None:
        """Submit a run."""
        device = "cpu" if job.config.device == "cpu" else "auto"  # Ray chooses the GPU
        cpus = min(self.processes * (job.config.threads or self.shares.cpus), self.shares.most)
        cpus = int(cpus) or fraction(cpus)
        gpus = self.shares.gpus if device == "auto" else 0
        on_node = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=NODE_DEATHS)(work_on_node)
        there = replace(job, config=replace(job.config, device=device))
        threads = max(1, int(cpus / self.processes))
        self.running[on_node.remote(there, os.getcwd(), threads, self.progress, self.processes)] = job

    def messages(self) -> Iterator[tuple[Job, Progress | Outcome]]:
        """What the runs have reported since the last call; waits up to a second for the end of one."""
        ended, _ = self.ray.wait(list(self.running), timeout=1)
        jobs = {job.number: job for job in self.running.values()}
        with contextlib.suppress(self.ray.exceptions.RayError):  # shown with the next
            for number, progress in self.progress.get_nowait_batch(self.progress.qsize()):
                if number in jobs:
                    yield jobs[number], progress
        for task in ended:
            job = self.running.pop(task)
            try:
                outcome: Outcome = self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                outcome = Outcome(failure=f"{type(error).__name__}: {first_line(error)}", again=True)
            if outcome.result:
                keep_result(job, outcome.result)
            yield job, outcome

    def stop(self) -> None:
        self.ray.shutdown()


def keep_result(job: Job, result: Mapping[str, Json]) -> None:
    """Write the result from a node that does not share the output folder."""
    if not is_finished(job.config):
        folder = run_folder(job.config)
        write_json(folder / "config.json", in_file(job.config.to_dict()))
        write_json(folder / RESULT, result)
        remove_unfinished(job.config)


class Shares(NamedTuple):
    """What a run has of a node: ``cpus`` for each of its processes, ``gpus`` for all; ``most``: the most cores."""

    cpus: float
    gpus: float
    most: int


def shares(nodes: Sequence[Mapping[str, float]], per_device: int, processes: int) -> Shares:
    """The :class:`Shares` of each run on these ``nodes``, given by their resources.

    The cores of a node are shared out among its GPUs. Without GPUs a run has its part of the node, or, if it has
    several ``processes``, a core for each. Nodes that cannot take a run do not count.
    """
    unit, name = ("GPU", "GPUs") if any(node.get("GPU") for node in nodes) else ("CPU", "GPUs or CPU cores")
    able = [node for node in nodes if node.get(unit, 0) >= processes]
    if not able:
        largest = max((node.get(unit, 0) for node in nodes), default=0)
        raise UserError(
            f"--gpus-per-run {processes}: no node of the cluster has {processes} {name} (the largest has {largest:g})"
        )
    most = int(max(node["CPU"] for node in able))
    if unit == "GPU":
        cpus = min(node["CPU"] / (per_device * node["GPU"]) for node in able)
        return Shares(cpus, processes * fraction(1 / per_device), most)
    return Shares(1.0 if processes > 1 else min(node["CPU"] for node in able) / per_device, 0, most)


def fraction(share: float) -> float:
    """``share``, rounded down to what Ray can count."""
    return math.floor(share * 10_000) / 10_000


def work_on_node(job: Job, cwd: str, threads: int, progress: Queue, processes: int = 1) -> Outcome:
    """Attempt a run on a node, with this many ``threads`` in each of its ``processes``. ``cwd``: the driver's working
    directory; ``progress``: the queue for (number of the job, progress).
    """
    if Path(cwd).is_dir():
        os.chdir(cwd)  # relative paths of the configuration then mean the same
    torch.set_num_threads(threads)

    def on_progress(message: Progress) -> None:
        with contextlib.suppress(Exception):  # progress that is not shown costs the run nothing
            progress.put((job.number, message))

    if processes > 1:
        return attempt_in_processes(job, processes, threads, on_progress)
    return attempt(job, datasets(), on_progress)


datasets = functools.cache(Datasets)  # Ray uses a process for many runs
