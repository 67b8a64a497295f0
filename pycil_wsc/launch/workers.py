"""Runs in processes of their own on this machine: several runs at a time, or several processes for each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

from pycil_wsc import devices
from pycil_wsc.data.parallel import cores
from pycil_wsc.engine.processes import from_first
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt, failed
from pycil_wsc.launch.schedule import Schedule
from pycil_wsc.launch.torchrun import follow
from pycil_wsc.runs.progress import Progress

STOPPING = {signal.SIGINT, signal.SIGTERM}
START_METHOD = "forkserver"  # a fork would inherit threads and the CUDA context; the server imports torch only once
DEATH_SECONDS = 1.0  # for which a failure of one process waits for the death of another that may be its cause


def run_in_processes(schedule: Schedule, workers: int, processes: int = 1) -> None:
    """Execute the runs of ``schedule``, so many at a time, each in so many new ``processes``."""
    schedule.data.forget()
    threads = max(1, cores() // (workers * processes))
    idle, busy = list(range(workers)), []
    try:
        while True:
            while idle and (job := schedule.next()):
                busy.append(RunInProcesses(job, processes, threads, slot=idle.pop(0)))
            if not busy:
                return
            connection.wait([place for run in busy for place in run.sources()], timeout=1)
            for run in list(busy):
                for message in run.messages():
                    if isinstance(message, Progress):
                        schedule.overview.progress(run.job, message)
                    else:
                        run.stop()
                        busy.remove(run)
                        idle.append(run.slot)
                        schedule.ended(run.job, message)
            schedule.overview.draw()
    finally:
        for run in busy:
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
        self.job, self.slot = job, slot
        context = multiprocessing.get_context(START_METHOD)
        context.set_forkserver_preload(["torch", "pycil_wsc.launch.kinds", __name__])
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        ending, self.life = context.Pipe(duplex=False)  # closes with this process, however it ends
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if count > 1 else None
        self.pipes = [receiver for receiver, _ in pipes]
        self.processes = []
        for rank, (_, sender) in enumerate(pipes):
            place = Place(rank, count, self.store.port if self.store else 0, threads, slot)
            arguments = job, place, sender, ending, multiprocessing.get_start_method()
            self.processes.append(context.Process(target=work, args=arguments))
        with signals_blocked():
            for process in self.processes:
                process.start()
        for connected in (ending, *(sender for _, sender in pipes)):
            connected.close()

    def sources(self) -> list[Connection | int]:
        """What becomes ready when there are new :meth:`messages`."""
        return [*self.pipes, *(process.sentinel for process in self.processes)]

    def messages(self) -> Iterator[Progress | Outcome]:
        """What the processes have reported since the last call. The last message of all is an :class:`Outcome`."""
        ended = self._ended()  # before reading: what a process has sent is there when it has ended
        outcome = None
        while outcome is None and (message := received(self.pipes[0])):
            if isinstance(message, Outcome):
                outcome = message
            else:
                yield message
        if outcome and not outcome.again:
            yield outcome
            return
        if outcome:  # perhaps since another has died; not by their pipes, which close before the exit code is there
            connection.wait([process.sentinel for process in self.processes[1:]], DEATH_SECONDS)
            ended = self._ended()
        failures = self._failures(ended, outcome)
        if failures:
            yield Outcome(
                failure="; ".join(name + failure.failure for name, failure in failures.items()),
                again=True,
                trace=next(iter(failures.values())).trace or (outcome.trace if outcome else ""),
            )

    def _ended(self) -> dict[int, int]:
        """The exit codes of the processes that have ended, by rank."""
        return {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode is not None}

    def _failures(self, ended: Mapping[int, int], outcome: Outcome | None) -> dict[str, Outcome]:
        """What failed, by the name of the process. The first, which told its ``outcome``, is the last: others may be
        the cause.
        """
        failures = {}
        count = len(self.processes)
        for rank in [*range(1, count), 0]:
            told = received(self.pipes[rank]) if rank else outcome
            name = f"process {rank + 1} of {count}" if count > 1 else "its process"
            if isinstance(told, Outcome):
                failures[f"{name}: " if count > 1 else ""] = told
            elif rank in ended and (ended[rank] or rank == 0):
                failures[f"{name} "] = Outcome(failure=f"died ({ending_of(ended[rank])})")
        return failures

    def stop(self) -> None:
        """End the processes and their data loaders at once. The run can resume from its last checkpoint."""
        self.life.close()
        for process in self.processes:
            process.join(1)
            process.kill()  # in case it is still starting, or stuck
            process.join()
        for pipe in self.pipes:
            pipe.close()


def received(pipe: Connection) -> Progress | Outcome | None:
    """The next message, or None if there is none at present, or no more at all."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def ending_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started within do not see Ctrl-C and SIGTERM, which only this process handles."""
    resource_tracker.ensure_running()  # started within, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the new processes --------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a process among the ``count`` of its run, which meet at ``port``."""

    rank: int
    count: int
    port: int
    threads: int
    slot: int

    def take(self) -> None:
        """Set this process up."""
        torch.set_num_threads(self.threads)
        if self.count > 1:
            os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.count)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(self.count), "MASTER_ADDR": "localhost"}
            os.environ |= {"MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ["TORCHELASTIC_RUN_ID"] = "pycil_wsc"
        else:
            devices.take_turns(self.slot)


def work(job: Job, place: Place, pipe: Connection, ending: Connection, start_method: str) -> None:
    """The main function of a process: the first attempts the run, the others follow it."""
    multiprocessing.set_start_method(start_method, force=True)  # data loaders start as in the main process
    threading.Thread(target=end_with, args=(ending,), daemon=True).start()
    place.take()

    def send(message):
        try:
            pipe.send(message)
        except OSError:
            os._exit(1)  # the parent is gone

    if place.rank:
        try:
            follow()
        except Exception as error:
            send(failed(error))
        return
    outcome = attempt(job, Datasets(), send)
    if not outcome.again:
        from_first(None)  # otherwise the others may be in the middle of the run: the parent ends them
    send(outcome)


def end_with(pipe: Connection) -> None:
    """End this process and its child processes when the other end of ``pipe`` closes."""
    connection.wait([pipe])
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
