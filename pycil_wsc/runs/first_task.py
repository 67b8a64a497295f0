"""The first task, trained once for all runs that share it.

It depends on the data, the class order, the backbone, the schedule and the seed, but neither on the memory nor, where
it is cross-entropy alone, on the method. What was trained is stored under a digest of all that decides it, the code
included, so that a run that takes it from there ends with the same numbers, bit for bit, as one that trains it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from filelock import Timeout

from pycil_wsc import registry
from pycil_wsc.config.config_checks import FIRST_TASKS
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.images.fingerprint import hash_of_weights
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import device_name
from pycil_wsc.errors import Unwritable, first_line
from pycil_wsc.files import Json, locked_if_writable
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.networks.timm_models import is_timm
from pycil_wsc.reproducibility import CODE, code_elsewhere
from pycil_wsc.runs.checkpoint import arithmetic
from pycil_wsc.state import State, load_state, save_state
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.processes import Processes


@contextlib.contextmanager
def shared(path: Path, processes: Processes, say: Callable[[str], None]) -> Iterator[Path | None]:
    """``path``, the file of a first task, locked by this process: while one trains it, others that need it wait.

    None in all processes but the first, which reads and writes it. ``say`` is called before a long wait.
    """
    lock = functools.partial(_lock, path, say) if processes.first else contextlib.nullcontext
    with processes.in_all(lock):
        yield path if processes.first else None


def _lock(path: Path, say: Callable[[str], None]) -> contextlib.AbstractContextManager:
    name = f".{path.name}.lock"
    try:
        return locked_if_writable(path.parent, name, wait=False)  # if it is not, :func:`save` says so
    except Timeout:
        say("waiting for the first task, which another run is training")
        return locked_if_writable(path.parent, name)


def load(path: Path) -> State | None:
    """The state after the first task, if it was saved. One that is damaged counts as none, and is written again."""
    try:
        return load_state(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, MemoryError) as error:
        logging.getLogger("pycil_wsc").warning("%s: %s; the first task is trained again", path, first_line(error))
        return None


def save(path: Path, state: State) -> None:
    """Save the state after the first task for other runs; if it cannot be written, this one goes on without."""
    try:
        save_state(path, state)
    except Unwritable as error:
        logging.getLogger("pycil_wsc").warning("cache_first_task: %s; other runs train the first task again", error)


def file_of(config: Config, dataset: Dataset, data: Mapping[str, Json], learner: BaseLearner) -> Path:
    """The file of the first task of the run with this ``config``, whose ``learner`` has learned nothing yet.

    Its name is a digest of all that decides the task: see ``decides`` in :mod:`pycil_wsc.keys`. ``data``: the
    fingerprint of ``dataset``. If ``device`` or ``precision`` is ``auto``, or ``threads`` is null, the value in use
    counts.
    """
    seen = learner.manager.tasks[0].num_seen
    info = dataset.info
    if dataset.arrivals:  # the data of later tasks do not matter
        data = data["tasks"][0]
        info = replace(info, classes=info.classes[:seen])
    packages = ["numpy", "pillow", "torch", "torchvision", *(["timm"] if is_timm(config.convnet_type) else [])]
    backbone = registry.backbones.get(config.convnet_type)
    optimizer = registry.optimizers[config.optimizer]
    keys = {name: value for name, value in config.first_task().items() if value is not None}  # as without the key
    decisive = {
        **keys,
        "classes": learner.manager.class_order[:seen],
        "data": data,
        "images_per_class": config.images_per_class,  # which the fingerprint is without
        **({"imbalance": config.imbalance} if config.imbalance else {}),  # likewise
        "info": repr(info),
        "weights": hash_of_weights(config.pretrained),
        "device": device_name(learner.device),
        "processes": learner.processes.count,
        "threads": torch.get_num_threads() if learner.device.type == "cpu" else None,
        **arithmetic(learner),
        "packages": [importlib.metadata.version(name) for name in packages],
        "code": CODE,
        "extensions": code_elsewhere([*configured_learner(config).__mro__, backbone, optimizer]),
    }
    name = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:20]
    return Path(config.out, FIRST_TASKS, f"{name}.pt")
