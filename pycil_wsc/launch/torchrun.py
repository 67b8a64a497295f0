"""Runs in the processes that ``torchrun`` started: the first one works on the sweep, the others take part in its runs.

Worker processes that share a run do the same; see :mod:`pycil_wsc.launch.workers`.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycil_wsc import devices, registry
from pycil_wsc.engine.processes import exchange, from_first, in_all, rank_and_count
from pycil_wsc.errors import TrainingDiverged, UnusableRun, UserError, WrongPlan
from pycil_wsc.launch.attempt import Datasets, execute

LIFE_SECONDS = 1.0  # between two looks at torchrun


def together(command: str, configs: Sequence[Any], work: Callable[[], int]) -> int:
    """Call ``work()`` in the first process and execute its runs in all processes. Returns the exit code.

    ``command``: what was asked for, such as "dry run"; no run is executed unless it is "run".
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    check_processes(command, configs)
    rank, _ = rank_and_count()
    if rank:
        follow()
        return 0
    code = work()
    from_first(None)
    return code


def follow() -> None:
    """Take part in each run that the first process begins, until it has no more."""
    data = Datasets()
    while config := from_first(None):
        with contextlib.suppress(TrainingDiverged, WrongPlan, UnusableRun):  # raised in all; the first one reports it
            execute(config, data, lambda progress: None)


def check_processes(command: str, configs: Sequence[Any]) -> None:
    """Raise a :class:`UserError` in every process if their commands, configurations or versions of torch differ, or if
    one of them lacks its device.
    """
    rank, count = rank_and_count()
    for config in configs:
        registry.kinds[config.kind].check_processes(config, count)
    settings = json.dumps([config.identity() for config in configs], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    _check_equal({"command": command, "configuration": digest, "version of torch": torch.__version__})
    if command == "run":
        _check_equal({"device": in_all(lambda: _devices(configs, f"torchrun: process {rank + 1} of {count}"))})


def _check_equal(described: dict[str, Any]) -> None:
    everyone = exchange(described)
    for other, description in enumerate(everyone):
        for name, value in description.items():
            if value != everyone[0][name]:
                raise UserError(
                    f"torchrun: process {other + 1} of {len(everyone)} has another {name} than the first; start the "
                    "same command on all nodes, with the same files and packages"
                )


def _devices(configs: Sequence[Any], process: str) -> list[str]:
    """The types of the devices that the runs use in this ``process``."""
    try:
        kinds = sorted({devices.resolved_device(config.device).type for config in configs})
    except UserError as error:
        raise UserError(f"{process}: {error}") from None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if set(kinds) - {"cpu"} and here > devices.count():
        raise UserError(
            f"{process}: one of {here} on a machine with {devices.count()} GPUs; start one process per GPU, or use "
            "--device cpu"
        )
    return kinds


def _end_with(parent: int) -> None:
    """End this process when its ``parent`` does: a killed ``torchrun`` ends nothing itself."""
    while os.getppid() == parent:
        time.sleep(LIFE_SECONDS)
    os._exit(1)
