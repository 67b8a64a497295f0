"""The state of a sweep's runs, read from their folders without reading any data set."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import Json, read_file, write_atomically
from pycil_wsc.output import watched
from pycil_wsc.results import finished_result, has_result
from pycil_wsc.runs.progress import Progress, duration

RECORD = "progress.json"  # in the run's folder while it is not finished
FAILURE = "failed.json"  # likewise, after a failed attempt
INTERVAL = 5.0  # seconds between two records
LATELY = 12 * INTERVAL  # a run that recorded its progress since then is at work


def recorded(on_progress: Callable[[Progress], None], folder: Path, planned: int) -> Callable[[Progress], None]:
    """Extend ``on_progress`` to record the progress in ``folder`` every few seconds.

    ``planned``: the cost of the whole run. If a record cannot be written, the run continues.
    """
    last = -INTERVAL

    def record_and_pass_on(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            left = max(0, planned - progress.images) / progress.speed if progress.speed else None
            record = {"position": progress.position, "seconds_left": left, "time": time.time()}
            with contextlib.suppress(UserError):
                write_atomically(folder / RECORD, json.dumps(record), durable=False)
        on_progress(progress)

    return record_and_pass_on


class State(NamedTuple):
    """The state of a run (``done``, ``running``, ``waiting`` or ``failed``), and details to print."""

    name: str
    line: str = ""


def state_of(config: RunConfig) -> State:
    """The state of a run. A stopped run counts as waiting, as the sweep's command resumes it."""
    folder = run_folder(config)
    try:
        if finished_result(config):
            return State("done")
    except UnusableRun as error:  # the run would fail, too
        return State("failed", str(error))
    record = _read(folder / RECORD)
    if (position := record.get("position")) and _at_work(folder, record):
        return State("running", f"{position}, {_left(record)} left")
    if (folder / FAILURE).exists():
        return State("failed", str(_read(folder / FAILURE).get("reason", "see log.txt")))
    if position:
        return State("waiting", f"stopped in {position}")
    return State("waiting", "has tasks to go" if has_result(folder) else "")  # that of the same run with fewer tasks


def _read(path: Path) -> dict[str, Json]:
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _left(record: dict[str, Json]) -> str:
    try:
        return duration(max(record["seconds_left"] - (time.time() - record["time"]), 0.0))
    except (KeyError, TypeError, ValueError, OverflowError):  # not known, or a damaged file
        return "?"


def _at_work(folder: Path, record: dict[str, Json]) -> bool:
    """Whether a process holds the folder's lock. Without permission to lock: whether it recorded progress recently."""
    try:
        with FileLock(folder / ".lock").acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        then = record.get("time")
        return isinstance(then, (int, float)) and time.time() - then < LATELY


def status(configs: Sequence[RunConfig]) -> int:
    """Print a line for each running, stopped or failed run, and the number of runs in each state; returns 0."""
    states: Counter[str] = Counter()
    for config in watched(configs, len(configs), "reading the folders"):
        state = state_of(config)
        states[state.name] += 1
        if state.line:
            print(f"{state.name:8} {run_folder(config)}  {state.line}")
    print(counted(states))
    return 0


def counted(states: Counter[str]) -> str:
    """The number of runs in each state."""
    others = (f"{name} {states[name]}" for name in ("running", "waiting", "failed"))
    return f"done {states['done']}/{states.total()}, {', '.join(others)}"
