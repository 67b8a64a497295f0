"""The training time of runs on this machine: those whose steps take equally long share a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable

from pycil_wsc.config.options import Config
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.tasks import tasks_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.engine.environment import threads
from pycil_wsc.errors import UserError, described
from pycil_wsc.learners import speed
from pycil_wsc.learners.planning import plan_of


def measurer() -> Callable[[Config, Dataset], float]:
    """A function that estimates the training time of a whole run, in seconds, from its configuration and data.

    Runs whose steps take equally long share a measurement; with a budget in operations, those that also have the same
    number of images. Testing, the choice of exemplars, resets and saving are not included.
    """
    measured: dict[str, speed.Stopwatch] = {}

    def seconds(config: Config, dataset: Dataset) -> float:
        plan = plan_of(config, tasks_of(dataset, config))
        if config.task_seconds:
            return config.task_seconds * len(plan)
        keys = config.keys
        decisive = {
            name: value
            for name, value in config.to_dict().items()
            if keys[name].affects == "time" and keys[name].decides not in ("name", "files")
        }
        shared_by = json.dumps([decisive, plan if config.operations_like else []], sort_keys=True)
        if shared_by not in measured:
            measured[shared_by] = _measured(config, for_training(dataset, config))
        if config.operations_like:
            return sum(map(measured[shared_by].seconds, range(len(plan))))
        return sum(images * each for images, each in zip(plan, measured[shared_by].seconds_per_image(), strict=True))

    return seconds


def _measured(config: Config, dataset: Dataset) -> speed.Stopwatch:
    """Measure and print the speed."""
    try:
        with threads(config.threads):
            watch = speed.measure(config, dataset)
    except UserError:
        raise
    except Exception as error:  # such as a GPU without enough memory
        raise UserError(f"--measure: {config.method} cannot be trained here ({described(error)})") from error
    print(f"measured {config.method}: {watch}", flush=True)
    return watch
