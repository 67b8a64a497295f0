"""Runs on a Ray cluster. Ray decides where and when, and restarts a run whose node died."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from pycil_wsc import registry
from pycil_wsc.config.options import in_file
from pycil_wsc.engine.environment import commit
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.files import locked, write_atomically, write_json
from pycil_wsc.launch.attempt import UNFINISHED, Datasets, Job, Outcome, attempt, failed
from pycil_wsc.launch.elastic import attempt_in_processes
from pycil_wsc.launch.overview import Mailbox
from pycil_wsc.runs.progress import Progress

NODE_DEATHS = 5  # failures of its node after which a run is still restarted
ANYWHERE = "DEFAULT"  # Ray's own choice of a node
ANSWER_SECONDS = 10  # for a cluster's first answer
MARK = ".shared-"


def run_on_cluster(schedule: Any, address: str, per_device: int, gpus_per_run: int) -> None:
    """Complete the runs of ``schedule``, ``per_device`` at a time on each GPU, or on each node if there is no GPU.

    With ``gpus_per_run`` above 1, each run is trained by that many processes on as many GPUs of one node; see
    :class:`Cluster`.
    """
    ray = connect(address)
    try:
        with Cluster(ray, per_device, gpus_per_run) as cluster:
            schedule.start()
            schedule.data.forget()
            complete(schedule, cluster)
    finally:
        ray.shutdown()


def complete(schedule: Any, cluster: Cluster) -> None:
    """Submit all runs to Ray, retries included, until none is left."""
    pending = {}
    while True:
        while job := schedule.next():
            pending[cluster.submit(job)] = job
        if not pending:
            return
        done, _ = cluster.ray.wait(list(pending), timeout=1)
        jobs = {job.number: job for job in pending.values()}
        for number, progress in cluster.new_progress():
            if number in jobs:
                schedule.overview.progress(jobs[number], progress)
        for task in done:
            job = pending.pop(task)
            schedule.ended(job, cluster.outcome(task, job))
        schedule.overview.draw()


def connect(address: str) -> Any:
    """The ``ray`` module, connected to the cluster at ``address``, to one found here, or to one started here."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray, which is not installed: pip install -r requirements-cluster.txt") from None
    if ":" in address:
        check_reachable(address)
    package, on_sigterm = Path(__file__).parent.parent, signal.getsignal(signal.SIGTERM)
    environment = {"py_modules": [str(package)], "env_vars": {"PYCIL_WSC_COMMIT": commit() or ""}}
    try:
        ray.init(address=address or None, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--ray{address and f' {address}'}: no cluster there ({first_line(error)}); "
            "give the address that 'ray start' printed"
        ) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in place
    return ray


def check_reachable(address: str) -> None:
    """Raise a :class:`UserError` unless something at ``address`` speaks HTTP/2, as Ray's ports do.

    Ray itself tries for minutes. Sends the preface of a connection and an empty settings frame; a server answers with
    its own settings (RFC 9113, 3.4).
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            answer = connection.recv(9, socket.MSG_WAITALL)
            if answer[3:4] != b"\4":
                raise ConnectionError("what answers there is not Ray")
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"--ray {address}: no cluster there ({error}); give the address that 'ray start' printed"
        ) from None


class Cluster:
    """The resources of each run on the cluster, and the transfer of its files. A context manager.

    A run has its part of a GPU, or one for each of its ``processes``, with the cores of the node shared out among its
    GPUs. On a cluster without GPUs it has its part of a node, or a core for each of its ``processes``.
    """

    def __init__(self, ray: Any, per_device: int, processes: int = 1) -> None:
        self.ray, self.processes, self.marks, self.places = ray, processes, {}, {}
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        nodes = usable(alive, processes)
        places = [node.get("GPU") or (node["CPU"] if processes > 1 else 1) for node in nodes]  # for a process each
        self.share = min(node["CPU"] / (per_device * number) for node, number in zip(nodes, places))
        self.most = int(max(node["CPU"] for node in nodes))
        self.gpus = processes * fraction(1 / per_device) if nodes[0].get("GPU") else 0
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        self.mailbox = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(
            Mailbox
        ).remote()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for mark, held in self.marks.values():
            mark.unlink(missing_ok=True)
            held.lock.release()

    def submit(self, job: Job) -> Any:
        """Submit a run; returns Ray's reference to its end."""
        config, folder = job.config, job.config.run_folder
        device = "cpu" if config.device == "cpu" else "auto"  # Ray chooses the GPU
        cpus = min(self.processes * (config.threads or self.share), self.most)
        cpus, gpus = int(cpus) or fraction(cpus), self.gpus if device == "auto" else 0
        place = self._place(cpus, gpus)
        run = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=NODE_DEATHS, scheduling_strategy=place)(
            work_on_node
        )
        resumes = (folder / registry.kinds[config.kind].checkpoint).exists()
        files = read_files(folder) if resumes else {}
        job, threads = replace(job, config=replace(config, device=device)), max(1, int(cpus / self.processes))
        task = run.remote(
            job, os.getcwd(), self._mark(config.out), files, threads, self.mailbox, processes=self.processes
        )
        self.places[task] = place
        return task

    def new_progress(self) -> list[tuple[int, Progress]]:
        """(number of the job, progress) of the runs under way."""
        return self.ray.get(self.mailbox.take.remote())

    def outcome(self, task: Any, job: Job) -> Outcome:
        """The outcome of a run. Files from a node that does not share the output folder are written there."""
        try:
            outcome, files = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            return failed(job, f"{type(error).__name__}: {first_line(error)}")
        finally:
            if (place := self.places.pop(task)) != ANYWHERE:
                self.ray.util.remove_placement_group(place.placement_group)
        deliver(job.config, files)
        return outcome

    def _place(self, cpus, gpus):
        """Where Ray may start a run: if it has several processes, in a placement group for all of them on one node.

        If the node dies, Ray moves the group to another one.
        """
        if self.processes == 1:
            return ANYWHERE
        bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        group = self.ray.util.placement_group([bundle], strategy="STRICT_PACK")
        return self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)

    def _mark(self, out):
        """A new file in the output folder; a node that sees it shares the folder.

        It is locked while this process lives. Those that killed processes left are removed.
        """
        if out not in self.marks:
            for old in Path(out).glob(f"{MARK}*"):
                with contextlib.suppress(Timeout, UserError, OSError), locked(out, old.name, wait=False):
                    old.unlink(missing_ok=True)
            mark = Path(out, f"{MARK}{uuid.uuid4().hex}")
            self.marks[out] = mark, locked(out, mark.name)
        return str(self.marks[out][0])


def usable(nodes: Sequence[Mapping[str, float]], processes: int) -> list[Mapping[str, float]]:
    """The nodes, given by their resources, that can take a run of so many ``processes``.

    They need a GPU for each if any node has GPUs, otherwise a core.
    """
    if not nodes:
        raise UserError("--ray: no node of the cluster offers CPU cores; start one with 'ray start --num-cpus N'")
    nodes = [node for node in nodes if node.get("GPU")] or nodes
    unit, name = ("GPU", "GPUs") if nodes[0].get("GPU") else ("CPU", "GPUs or CPU cores")
    largest = max(node[unit] for node in nodes)
    if largest < processes:
        raise UserError(
            f"--gpus-per-run {processes}: no node of the cluster has {processes} {name} (the largest has {largest:g})"
        )
    return [node for node in nodes if node[unit] >= processes]


def fraction(share: float) -> float:
    """``share``, rounded down to what Ray can count."""
    return math.floor(share * 10_000) / 10_000


def work_on_node(
    job: Job, cwd: str, mark: str, files: dict[str, bytes], threads: int, mailbox: Any, processes: int = 1
) -> tuple[Outcome, dict[str, bytes]]:
    """Attempt a run on a node; returns its outcome and its files, none if the node sees the driver's output folder.

    ``files``: the run's files so far, from the driver; ``threads``: of each of its ``processes``.
    """
    if Path(cwd).is_dir():
        os.chdir(cwd)  # relative paths of the configuration then mean the same
    torch.set_num_threads(threads)

    def on_progress(progress):
        mailbox.put.remote((job.number, progress))

    def work(job):
        if processes > 1:
            return attempt_in_processes(job, processes, threads, on_progress)
        return attempt(job, datasets(), on_progress)

    if Path(mark).exists():
        return work(job), {}
    with tempfile.TemporaryDirectory() as out:
        job = replace(job, config=replace(job.config, out=out))
        write_files(job.config.run_folder, files)
        return work(job), read_files(job.config.run_folder)


datasets = functools.cache(Datasets)  # Ray uses a process for many runs


def deliver(config: Any, files: dict[str, bytes]) -> None:
    """Write a run's ``files`` into its folder, unless another process finished it there.

    The result of a run with fewer tasks, which this one extends, is replaced. The result is written last, since it
    marks the run as finished.
    """
    if not files:
        return
    folder = config.run_folder
    with locked(folder):
        if (folder / "result.json").exists() and not registry.kinds[config.kind].extends(config):
            return
        result = files.pop("result.json", None)
        write_files(folder, files)
        write_json(folder / "config.json", in_file(config.to_dict()))
        if result:
            write_atomically(folder / "result.json", result)
            for name in {registry.kinds[config.kind].checkpoint, *UNFINISHED} - set(files):
                (folder / name).unlink(missing_ok=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of a run's files by name, without locks and partial files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        write_atomically(folder / name, content)
