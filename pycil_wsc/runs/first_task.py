"""The first task, trained once for all runs that share it.

It depends on the data, the class order, the backbone, the schedule and the seed, but neither on the memory nor, where
it is cross-entropy alone, on the method. What was trained is stored under a digest of all that decides it, the code
included, so that a run that takes it from there ends with the same numbers, to the bit, as one that trains it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from filelock import Timeout

from pycil_wsc import registry
from pycil_wsc.config.options import Config
from pycil_wsc.data.types import Dataset
from pycil_wsc.devices import device_name
from pycil_wsc.engine.processes import Processes
from pycil_wsc.files import Json, locked
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.learners.consolidating import configured_learner
from pycil_wsc.networks.timm_models import is_timm
from pycil_wsc.state import State, load_state


@contextlib.contextmanager
def shared(path: Path, processes: Processes, say: Callable[[str], None]) -> Iterator[Path | None]:
    """``path``, the file of a first task, locked by this process: while one trains it, others that need it wait.

    None in all processes but the first, which reads and writes it. ``say`` is called before a long wait.
    """
    with processes.in_all(lambda: _lock(path, say) if processes.first else contextlib.nullcontext()):
        yield path if processes.first else None


def _lock(path: Path, say: Callable[[str], None]) -> contextlib.AbstractContextManager:
    """Let no other command train the first task."""
    lock = f".{path.name}.lock"
    try:
        return locked(path.parent, lock, wait=False)
    except Timeout:
        say("waiting for the first task, which another run is training")
        return locked(path.parent, lock)


def load(path: Path) -> State | None:
    """The state after the first task, if it was saved. One that is damaged counts as none, and is written again."""
    try:
        return load_state(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except ValueError as error:
        problem = f"is damaged ({error})"
    logging.getLogger("pycil_wsc").warning("%s: %s; the first task is trained again", path, problem)
    return None


def file_of(config: Config, dataset: Dataset, data: Mapping[str, Json], learner: BaseLearner) -> Path:
    """The file of the first task of the run with this ``config``, whose ``learner`` has learned nothing yet."""
    return Path(config.out, "first_tasks", f"{key(config, dataset, data, learner)}.pt")


def key(config: Config, dataset: Dataset, data: Mapping[str, Json], learner: BaseLearner) -> str:
    """A digest of all that decides the first task: see ``decides`` in :mod:`pycil_wsc.keys`.

    ``data``: the fingerprint of ``dataset``. If ``device`` or ``precision`` is ``auto``, or ``threads`` is null, the
    value in use counts.
    """
    seen = learner.manager.tasks[0].num_seen
    decisive, info = config.first_task(), dataset.info
    if dataset.arrivals:  # the data of later tasks do not matter
        data, info = data["tasks"][0], replace(info, classes=info.classes[:seen])
    decisive |= {"classes": learner.manager.class_order[:seen], "data": data, "info": repr(info)}
    decisive |= {"weights": digest_of(config.pretrained) if isinstance(config.pretrained, str) else None}
    decisive |= {"device": device_name(learner.device), "processes": learner.processes.count}
    decisive |= {"threads": torch.get_num_threads() if learner.device.type == "cpu" else None}
    decisive |= {"precision": learner.precision, "torch": torch.__version__, "code": code()}
    packages = ["numpy", "pillow", "torchvision", *(["timm"] if is_timm(config.convnet_type) else [])]
    decisive |= {"packages": [importlib.metadata.version(name) for name in packages]}
    decisive |= {"extensions": code_elsewhere(config)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:20]


def digest_of(path: str) -> str:
    """A digest of a file's contents."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def code() -> str:
    """A digest of the source that computes."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(
        path
        for folder in ("data", "networks", "engine", "learners", "consolidation")
        for path in (root / folder).rglob("*.py")
    ):
        digest.update(path.read_bytes())
    digest.update((root / "seeding.py").read_bytes())
    return digest.hexdigest()


def code_elsewhere(config: Config) -> list[str]:
    """Digests of the other packages and modules that define the run's learner, backbone and optimiser."""
    used = [
        *configured_learner(config).__mro__,
        registry.backbones.get(config.convnet_type),
        registry.optimizers[config.optimizer],
    ]
    modules = {module for entry in used if (module := inspect.getmodule(entry))}
    tops = {module.__name__.partition(".")[0] for module in modules}
    known = {"pycil_wsc", "torch", *sys.stdlib_module_names}  # torch's version is in the key
    return [_digest_of_module(sys.modules[name]) for name in sorted(tops - known)]


def _digest_of_module(module):
    """A digest of all source files of a module or package; another one at each call if it has none."""
    folders = getattr(module, "__path__", [])
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    if not paths and not getattr(module, "__file__", None):
        return os.urandom(8).hex()
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths or [Path(module.__file__)])).hexdigest()
