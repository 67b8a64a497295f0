"""Parallel runs on one machine, in worker processes that live as long as the sweep."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch

from pycil_wsc import devices
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt, failed
from pycil_wsc.runs.progress import Progress

STOPPING = {signal.SIGINT, signal.SIGTERM}
START_METHOD = "spawn"  # a fork would inherit threads and the CUDA context


def run_in_processes(schedule: Any, count: int) -> None:
    """Execute the runs of ``schedule``, ``count`` at a time.

    If a worker dies, its run counts as failed, and the worker is replaced.
    """
    schedule.data.forget()
    workers = [Worker(number, max(1, cores() // count)) for number in range(count)]
    try:
        while busy := hand_out(schedule, workers):
            ready = connection.wait([worker.pipe for worker in busy], timeout=1)
            for worker in busy:
                if worker.pipe in ready or not worker.process.is_alive():
                    message = worker.receive()
                    if isinstance(message, Progress):
                        schedule.overview.progress(worker.job, message)
                    else:
                        schedule.ended(worker.end(message), message)
            schedule.overview.draw()
    finally:
        for worker in workers:
            worker.stop()


def hand_out(schedule: Any, workers: list[Worker]) -> list[Worker]:
    """Give a run to each idle worker while there are any left; returns the busy workers."""
    for worker in workers:
        if worker.job is None and (job := schedule.next()):
            worker.start(job)
    return [worker for worker in workers if worker.job]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """The handle of a worker process, which executes one run after another."""

    def __init__(self, number: int, threads: int) -> None:
        self.number, self.threads = number, threads
        self.process: Any = None  # the multiprocessing process, while it lives
        self.job: Any = None  # the current Job, if any

    def start(self, job: Job) -> None:
        """Start a run."""
        self.job = job
        if self.process is None:
            self._spawn()
        with contextlib.suppress(OSError):  # the process died; receive() reports it
            self.pipe.send(job)

    def receive(self) -> Progress | Outcome:
        """The worker's next message: a :class:`Progress`, or the :class:`Outcome` of its run."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv()
        self.process.join()
        code = self.process.exitcode
        return failed(self.job, f"its process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")

    def end(self, outcome: Outcome) -> Job:
        """Mark the worker as idle; returns its job.

        After a failure, the process is replaced, because a CUDA error may have corrupted it.
        """
        job, self.job = self.job, None
        if outcome.failure:
            self.stop()
        return job

    def stop(self) -> None:
        """Stop the process and its data loaders at once. Its run can resume from its last checkpoint."""
        if self.process is not None:
            self.pipe.close()
            self.life.close()
            self.process.join(1)
            self.process.kill()  # in case it is still starting, or stuck
            self.process.join()
            self.process = None

    def _spawn(self):
        context = multiprocessing.get_context(START_METHOD)
        self.pipe, theirs = context.Pipe()
        ending, self.life = context.Pipe(duplex=False)  # closes with this process, however it ends
        self.process = context.Process(
            target=work, args=(theirs, ending, self.number, self.threads, multiprocessing.get_start_method())
        )
        resource_tracker.ensure_running()  # started later, it would unblock the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # inherited by the worker: only we handle Ctrl-C
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        ending.close()


def work(pipe: Connection, ending: Connection, number: int, threads: int, start_method: str) -> None:
    """The main function of a worker process: execute each run received through ``pipe``, and send back progress and
    outcomes.
    """
    multiprocessing.set_start_method(start_method, force=True)  # data loaders start as in the main process
    threading.Thread(target=end_with, args=(ending,), daemon=True).start()
    devices.take_turns(number)

    def send(message):
        try:
            pipe.send(message)
        except OSError:
            os._exit(1)  # the parent is gone

    data = Datasets()
    with contextlib.suppress(EOFError):
        while job := pipe.recv():
            torch.set_num_threads(threads)
            send(attempt(job, data, send))


def end_with(pipe: Connection) -> None:
    """End this process and its child processes when the other end of ``pipe`` closes."""
    connection.wait([pipe])
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
