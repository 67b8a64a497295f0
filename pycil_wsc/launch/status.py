"""The state of a sweep's runs, read from their folders without reading any data set."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from pycil_wsc.config.forms import run_folder
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json
from pycil_wsc.launch.kinds import kind_of
from pycil_wsc.results import RESULT, has_result, read_result
from pycil_wsc.runs.progress import Progress, duration

RECORD = "progress.json"  # in the run's folder while it is not finished
INTERVAL = 5.0  # seconds between two records
LATELY = 12 * INTERVAL  # a run that recorded its progress since then is at work


def recorded(on_progress: Callable[[Progress], None] | None, folder: Path, planned: int) -> Callable[[Progress], None]:
    """Extend ``on_progress`` to record the progress in ``folder`` every few seconds.

    ``planned``: the cost of the whole run. If a record cannot be written, the run continues.
    """
    last = -INTERVAL

    def pass_on_and_record(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            _record(progress, folder, planned)
        if on_progress:
            on_progress(progress)

    return pass_on_and_record


def _record(progress: Progress, folder: Path, planned: int) -> None:
    left = progress.seconds_left(planned)
    partial = folder / f".{RECORD}.partial"
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps({"position": progress.position, "seconds_left": left, "time": time.time()}))
        os.replace(partial, folder / RECORD)


class State(NamedTuple):
    """The state of a run (``done``, ``running``, ``waiting`` or ``failed``), and details to print."""

    name: str
    line: str = ""


def state_of(folder: Path, extended: bool = False) -> State:
    """The state of the run in ``folder``. A stopped run counts as waiting, as the sweep's command resumes it.

    ``extended``: the present result is that of the same run with fewer tasks.
    """
    if has_result(folder) and not extended:
        return _state_of_result(folder / RESULT)
    record = _read(folder / RECORD)
    position = str(record.get("position", ""))
    if position and _at_work(folder):
        return State("running", f"{position}, {_left(record)}")
    if (folder / "failed.json").exists():
        return State("failed", str(_read(folder / "failed.json").get("reason", "see log.txt")))
    return State("waiting", f"stopped in {position}" if position else "has tasks to go" if extended else "")


def _state_of_result(path: Path) -> State:
    """Done; or failed, as the run would, if its result is incomplete."""
    try:
        read_result(path)
    except UserError as error:
        return State("failed", str(error))
    return State("done")


def _left(record: dict[str, Json]) -> str:
    left, then = record.get("seconds_left"), record.get("time")
    if not isinstance(left, (int, float)) or not isinstance(then, (int, float)):
        return "time left unknown"
    return f"{duration(max(0.0, left - (time.time() - then)))} left"


def _read(path: Path) -> dict[str, Json]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _at_work(folder: Path) -> bool:
    """Whether a process holds the folder's lock. Without permission to lock: whether it recorded progress recently."""
    try:
        with FileLock(folder / ".lock").acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        then = _read(folder / RECORD).get("time")
        return isinstance(then, (int, float)) and time.time() - then < LATELY


def status(configs: Iterable[RunConfig]) -> int:
    """Print a line for each running, stopped or failed run, and the number of runs in each state; returns 0."""
    counts: Counter[str] = Counter()
    for config in configs:
        folder = run_folder(config)
        state = state_of(folder, kind_of(config).extends(config))
        counts[state.name] += 1
        if state.line:
            print(f"{state.name:8} {folder}  {state.line}")
    names = ("running", "waiting", "failed")
    print(f"done {counts['done']}/{counts.total()}, " + ", ".join(f"{name} {counts[name]}" for name in names))
    return 0
