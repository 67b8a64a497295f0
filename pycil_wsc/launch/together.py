"""Runs in several ``torchrun`` processes: the first one works on the sweep, the others take part in its runs."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycil_wsc import devices, registry
from pycil_wsc.engine.processes import announcements, rank_and_count
from pycil_wsc.errors import TrainingDiverged, UnusableRun, UserError, WrongPlan
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.progress import log_closed_after


def together(configs: Sequence[Any], work: Callable[[], int]) -> int:
    """Call ``work()`` in the first process and execute its runs in all processes. Returns the exit code."""
    check_processes(configs)
    rank, _ = rank_and_count()
    if rank:
        return take_part_in_runs()
    code = work()
    announcements().announce(None)
    return code


def check_processes(configs: Sequence[Any]) -> None:
    """Raise a :class:`UserError` in every process if their configurations, devices or versions of torch differ."""
    rank, count = rank_and_count()
    for config in configs:
        registry.kinds[config.kind].check_processes(config, count)
    everyone = announcements().exchange(_described(configs))
    for other, description in enumerate(everyone):
        if problem := description.get("problem"):
            raise UserError(f"torchrun: process {other + 1} of {count}: {problem}")
        for name, value in description.items():
            if value != everyone[0][name]:
                raise UserError(
                    f"torchrun: process {other + 1} of {count} has another {name} than the first; start the same "
                    "command on all nodes, with the same files and packages"
                )


def _described(configs):
    """Values that must be equal in all processes, or the ``problem`` of this one."""
    try:
        kinds = sorted({devices.resolved_device(config.device).type for config in configs})
    except UserError as error:
        return {"problem": str(error)}
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if kinds != ["cpu"] and here > devices.count():
        return {
            "problem": f"one of {here} on a machine with {devices.count()} GPUs; start one process per GPU, "
            "or use --device cpu"
        }
    settings = json.dumps([config.identity() for config in configs], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return {"configuration": digest, "device": kinds, "version of torch": torch.__version__}


def take_part_in_runs() -> int:
    """Take part in each run that the first process announces. Returns the exit code."""
    rank, count = rank_and_count()
    data = Datasets()
    for message in announcements().listen():
        kind = registry.kinds[message["kind"]]
        config = kind.resolve(message["config"])
        try:
            with log_closed_after(config.run_folder):
                kind.execute(config, data.of(config), lambda progress: None)
        except (TrainingDiverged, WrongPlan, UnusableRun):  # raised in all processes; the first one reports it
            continue
        except UserError as error:
            print(f"error: process {rank + 1} of {count}: {error}", file=sys.stderr)
            return 2
    return 0
