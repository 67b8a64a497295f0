"""Runs in processes of their own on this machine: several runs at a time, or several processes for each."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore

from pycil_wsc import devices
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.data.images.parallel import cores
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt
from pycil_wsc.launch.torchrun import follow
from pycil_wsc.registry import own_modules
from pycil_wsc.runs.progress import Progress, log_file
from pycil_wsc.training.processes import from_first

STOPPING = {signal.SIGINT, signal.SIGTERM}
# a fork would inherit threads and the CUDA context; a server imports torch only once, but forks, unsafely on macOS
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
DEATH_SECONDS = 3.0  # how long, after one process fails, to wait for the death of another that may be the cause


class Workers:
    """Executes ``workers`` runs at a time, each in ``processes`` new processes; all share the CPU cores."""

    def __init__(self, workers: int, processes: int = 1) -> None:
        self.processes = processes
        self.threads = max(1, cores() // (workers * processes))
        self.slots = list(range(workers))  # the free ones
        self.running: list[RunInProcesses] = []

    def start(self, job: Job) -> None:
        self.running.append(RunInProcesses(job, self.processes, self.threads, self.slots.pop(0)))

    def messages(self) -> Iterator[tuple[Job, Progress | Outcome]]:
        """What the runs have reported since the last call; waits up to a second for it."""
        connection.wait([source for run in self.running for source in run.sources()], timeout=1)
        for run in list(self.running):
            for message in run.messages():
                if isinstance(message, Outcome):
                    run.stop()
                    self.running.remove(run)
                    self.slots.append(run.slot)
                yield run.job, message

    def stop(self) -> None:
        for run in self.running:
            run.stop()


def attempt_in_processes(job: Job, count: int, threads: int, on_progress: Callable[[Progress], None]) -> Outcome:
    """One attempt at a run in ``count`` new processes; ``on_progress`` is called with what the first reports."""
    run = RunInProcesses(job, count, threads)
    try:
        while True:
            connection.wait(run.sources())
            for message in run.messages():
                if isinstance(message, Outcome):
                    return message
                on_progress(message)
    finally:
        run.stop()


class RunInProcesses:
    """One attempt at a run, in ``count`` new processes with ``threads`` threads each. They end with this process.

    Several processes have one of the GPUs each, and share the run as under ``torchrun``. If one of them dies, the
    attempt has failed. A single process has the GPU that is number ``slot`` of those on this machine, counted round.
    """

    def __init__(self, job: Job, count: int, threads: int, slot: int = 0) -> None:
        self.job = job
        self.slot = slot
        context = multiprocessing.get_context(START_METHOD)
        imported_before = [__name__, *own_modules()]  # what is edited later is not a part of these runs
        context.set_forkserver_preload(["torchvision", *imported_before])
        self.pipe, sender = context.Pipe(duplex=False)  # the first process reports through it
        ending, self.life = context.Pipe(duplex=False)  # closes with this process, however it ends
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if count > 1 else None
        common = job, threads, slot, ending, multiprocessing.get_start_method()
        self.processes = []
        for rank in range(count):
            place = variables(rank, count, self.store.port) if self.store else {}
            reports_through = sender if rank == 0 else None
            self.processes.append(context.Process(target=work, args=(place, reports_through, *common)))
        with signals_blocked():
            for process in self.processes:
                process.start()
        ending.close()
        sender.close()

    def sources(self) -> list[Connection | int]:
        """What becomes ready when there are new :meth:`messages`."""
        return [self.pipe, *(process.sentinel for process in self.processes)]

    def messages(self) -> Iterator[Progress | Outcome]:
        """What the processes have reported since the last call. The last message of all is an :class:`Outcome`."""
        # before reading what it may have sent; the first process ends with an outcome only, whatever its exit code
        died = any(process.exitcode for process in self.processes) or self.processes[0].exitcode is not None
        message = received(self.pipe)
        while isinstance(message, Progress):
            yield message
            message = received(self.pipe)
        if message and not message.again:
            yield message
        elif message or died:
            yield self._failure(message)

    def _failure(self, told: Outcome | None) -> Outcome:
        """The outcome ``told`` by the first process or, if one was killed, its death, which made the others fail."""
        end = time.monotonic() + DEATH_SECONDS
        # a process that has reported an outcome is still alive
        ended = self.processes[1:] if told else self.processes
        for process in ended:
            process.join(max(0, end - time.monotonic()))  # its connections close before its exit code is there
        codes = [process.exitcode or 0 for process in self.processes]
        if told and min(codes) >= 0:
            return told
        worst = min(codes) or max(codes)  # a signal, which is below 0, comes before an exit code
        rank = codes.index(worst)
        name = f"process {rank + 1} of {len(codes)}" if len(codes) > 1 else "its process"
        ending = signal.Signals(-codes[rank]).name if codes[rank] < 0 else f"exit code {codes[rank]}; see log.txt"
        return Outcome(failure=f"{name} died ({ending})", again=True)

    def stop(self) -> None:
        """End the processes and their data loaders at once. The run can resume from its last checkpoint."""
        self.life.close()
        for process in self.processes:
            process.join(1)
            process.kill()  # in case it is still starting, or stuck
            process.join()
        self.pipe.close()


def received(pipe: Connection) -> Progress | Outcome | None:
    """The next message, or None if there is none at present, or no more at all."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started within do not see Ctrl-C and SIGTERM, which only this process handles."""
    resource_tracker.ensure_running()  # started within, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment of a process, as torchrun sets it, among the ``count`` that meet at ``port``."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (here | meeting | {"TORCHELASTIC_RUN_ID": "pycil_wsc"}).items()}


# ---- in the new processes --------------------------------------------------------------------------------------------


def work(
    place: dict[str, str],
    pipe: Connection | None,
    job: Job,
    threads: int,
    slot: int,
    ending: Connection,
    start_method: str,
) -> None:
    """The main function of a process: the first, which has the ``pipe``, attempts the run, the others follow it."""
    multiprocessing.set_start_method(start_method, force=True)  # data loaders start as in the main process
    end_with(ending)
    torch.set_num_threads(threads)
    os.environ |= place
    if not place:
        devices.take_turns(slot, job.config.device)
    if pipe is None:
        try:
            return follow()
        except Exception as error:
            known = isinstance(error, UserError)
            with log_file(run_folder(job.config)) as log:
                log.error("process %d failed: %s", int(place["RANK"]) + 1, error, exc_info=not known)
            time.sleep(DEATH_SECONDS if known else 0)  # if it was raised in all, the first one tells it
            sys.exit(1)

    def send(message: Progress | Outcome) -> None:
        try:
            pipe.send(message)
        except OSError:
            os._exit(1)  # the parent is gone

    outcome = attempt(job, Datasets(), send)
    if not outcome.again:
        from_first(None)  # otherwise the others may be in the middle of the run: the parent ends them
    send(outcome)


def end_with(pipe: Connection) -> None:
    """End this process, and all that it starts, when the other end of ``pipe`` closes."""

    def end() -> None:
        connection.wait([pipe])
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # in the main thread, torch raises that a data loader was killed
        logging.disable()
        for child in multiprocessing.active_children() if os.getpid() == first else ():
            child.kill()
            child.join(1)  # it may hold a lock
        os._exit(1)

    def wait_in_a_thread() -> None:
        threading.Thread(target=end, daemon=True).start()

    first = os.getpid()
    wait_in_a_thread()
    if hasattr(os, "register_at_fork"):  # a data loader that is just being forked is not among the active children
        os.register_at_fork(after_in_child=wait_in_a_thread)
