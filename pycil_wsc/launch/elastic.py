"""One run in several new processes of this machine, which torch's elastic agent starts as ``torchrun`` does."""

import contextlib
import multiprocessing
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pycil_wsc.engine.processes import announcements, rank_and_count
from pycil_wsc.launch.attempt import Datasets, Job, Outcome, attempt, failed
from pycil_wsc.launch.together import take_part_in_runs
from pycil_wsc.launch.workers import end_with

MONITOR_SECONDS = 0.1  # between two checks of the processes by the agent
START_METHOD = "forkserver"  # the server imports torch once for all processes


def attempt_in_processes(job: Job, count: int, threads: int, on_progress: Callable[[Any], None]) -> Outcome:
    """Attempt a run in ``count`` processes, each with ``threads`` threads and one of the GPUs that are visible here.

    Without GPUs they compute on the CPU. If one of them dies, the others are ended, and the attempt has failed. They
    also end with this process. ``on_progress`` is called here, with what the first process reports.
    """
    messages, sender = multiprocessing.Pipe(duplex=False)
    ending, life = multiprocessing.Pipe(duplex=False)  # closes with this process, however it ends
    arguments = job, threads, multiprocessing.get_start_method(), ending, sender
    outcome = None
    with messages, ending, tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(1) as pool, life:
        # In a thread: the agent would replace this process's signal handlers.
        launched = pool.submit(launch, count, logs, arguments)
        launched.add_done_callback(lambda _: sender.close())
        for message in received(messages):
            if isinstance(message, Outcome):
                outcome = message
            else:
                on_progress(message)
        try:
            launched.result()
        except ChildFailedError as error:
            return after_failure(error, job, count, outcome)
    assert outcome is not None  # the first process exited without an error
    return outcome


def launch(count: int, logs: str, arguments: tuple[Any, ...]) -> None:
    """Call ``take_part(*arguments)`` in ``count`` processes, until all have returned or one has failed.

    Raises torch's ``ChildFailedError``. The processes find each other on this machine; ``logs`` is a folder for the
    tracebacks of failed processes, which the agent reads.
    """
    multiprocessing.get_context(START_METHOD).set_forkserver_preload([__name__])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method=START_METHOD,
        logs_specs=DefaultLogsSpecs(logs),
    )
    elastic_launch(config, take_part)(*arguments)


def take_part(job: Job, threads: int, start_method: str, ending: Connection, messages: Connection) -> None:
    """The main function of one of the processes: the first attempts the run, the others follow it.

    Progress and the outcome are sent through ``messages``. The process ends when the other end of ``ending`` closes.
    """
    multiprocessing.set_start_method(start_method, force=True)  # image decoders start as they do in one process
    threading.Thread(target=end_with, args=(ending,), daemon=True).start()
    torch.set_num_threads(threads)
    rank, _ = rank_and_count()
    if rank:
        if code := take_part_in_runs():
            sys.exit(code)
        return
    outcome = attempt(job, Datasets(), messages.send)
    messages.send(outcome)
    if outcome.again or outcome.error:
        time.sleep(10 * MONITOR_SECONDS)  # where another process died first, the agent finds that one
        sys.exit(1)  # the others may be in the middle of the run: the agent ends them
    announcements().announce(None)


def received(messages: Connection) -> Iterator[Any]:
    """What comes through a pipe until its other end closes, even in the middle of a message."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield messages.recv()


def after_failure(error: ChildFailedError, job: Job, count: int, outcome: Outcome | None) -> Outcome:
    """The outcome of an attempt in which a process failed; ``outcome`` is the first process's, if it sent one.

    One failure makes the others fail, so several processes may report a reason.
    """
    rank, failure = error.get_first_failure()
    if outcome and (rank == 0 or not outcome.failure):
        return outcome
    reason = f"process {rank + 1} of {count} {how_it_ended(failure)}"
    return failed(job, f"{reason}; process 1: {outcome.failure}" if outcome else reason, error=error)


def how_it_ended(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"died ({failure.signal_name()})"
    message: Any = failure.message
    if isinstance(message, dict):  # of an exception
        return f"failed: {' '.join(message['message'].split())} (traceback in log.txt)"
    return f"ended with exit code {failure.exitcode}"
