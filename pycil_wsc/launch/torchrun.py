"""One run in the processes that ``torchrun`` started: the first works on it as a command does, the others take part.

Worker processes that share a run do the same; see :mod:`pycil_wsc.launch.workers`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from pycil_wsc.config.kinds import kind_of
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.errors import TrainingDiverged, UnusableRun, UserError, WrongPlan
from pycil_wsc.launch.attempt import Datasets, execute
from pycil_wsc.training.processes import check_machines, from_first, in_all, rank_and_count

LIFE_SECONDS = 1.0  # between two looks at torchrun


def together(load: Callable[[], Sequence[RunConfig]], work: Callable[[Sequence[RunConfig]], int], trains: bool) -> int:
    """Load the configurations in the first process, call ``work`` with them there, and execute its run in all.

    The first process decides alone: what the others were asked for does not count. ``trains``: whether ``work`` may
    execute a run, for which every process needs its device. Returns the exit code.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    rank = rank_and_count()[0]
    configs = in_all(lambda: _loaded(load, trains) if rank == 0 else [])
    names = from_first([config.device for config in configs] if trains else [])
    check_machines(names)
    if rank:
        follow()
        return 0
    try:
        return work(configs)
    finally:
        from_first(None)  # if it has begun no run, the others still wait for one


def _loaded(load: Callable[[], Sequence[RunConfig]], trains: bool) -> Sequence[RunConfig]:
    configs = load()
    count = rank_and_count()[1]
    if trains and len(configs) > 1:
        raise UserError(
            f"torchrun: its processes train one run, but there are {len(configs)}; choose one with --set, or start "
            f"all of them with python and --gpus-per-run {count}"
        )
    for config in configs:
        kind_of(config).check_processes(config, count)
    return configs


def follow() -> None:
    """Take part in the run that the first process begins, if it begins one."""
    if config := from_first(None):
        with contextlib.suppress(TrainingDiverged, WrongPlan, UnusableRun):  # raised in all; the first one reports it
            execute(config, Datasets(), lambda progress: None)


def _end_with(parent: int) -> None:
    """End this process when its ``parent`` does: a killed ``torchrun`` ends nothing itself."""
    while os.getppid() == parent:
        time.sleep(LIFE_SECONDS)
    os._exit(1)
