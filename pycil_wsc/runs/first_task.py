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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from pycil_wsc import registry
from pycil_wsc.data.datasets import Dataset
from pycil_wsc.devices import device_name
from pycil_wsc.files import locked
from pycil_wsc.networks.timm_models import is_timm
from pycil_wsc.state import load_state, save_state

REDONE = ".redone"  # in the folder of a run that is done again, until it is finished


def ignore_older(folder: Path) -> None:
    """Let the run in ``folder`` take no first task that was trained before now."""
    (folder / REDONE).touch()


@contextlib.contextmanager
def shared(run: Any, dataset: Dataset) -> Iterator["Entry"]:
    """The entry of ``run``'s first task, locked by this process: while one trains it, others that need it wait."""
    path = Path(run.config.out, "first_tasks", f"{key(run, dataset)}.pt")
    with run.processes.in_all(lambda: _lock(run, path)):
        yield Entry(path, run.folder / REDONE) if run.processes.first else Entry(None)


def _lock(run: Any, path: Path) -> contextlib.AbstractContextManager:
    """Let no other command train the first task: a context, empty in all processes but the first."""
    if not run.processes.first:
        return contextlib.nullcontext()
    lock = f".{path.name}.lock"
    try:
        return locked(path.parent, lock, wait=False)
    except Timeout:
        run.journal.bar.say("waiting for the first task, which another run is training")
        return locked(path.parent, lock)


class Entry:
    """The file for the state after the first task; it need not exist yet. None in all processes but the first.

    ``newer_than``: a file; if it exists, a state that is older is not taken.
    """

    def __init__(self, path: Path | None, newer_than: Path | None = None) -> None:
        self.path, self.newer_than = path, newer_than

    def load(self) -> dict[str, Any] | None:
        """The state that was saved, or None. One that is damaged or too old counts as none, and is written again."""
        if self.path is None or self._too_old(self.path):
            return None
        try:
            return load_state(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except ValueError as error:
            problem = f"is damaged ({error})"
        logging.getLogger("pycil_wsc").warning("%s: %s; the first task is trained again", self.path, problem)
        return None

    def _too_old(self, path: Path) -> bool:
        try:
            limit = self.newer_than
            return limit is not None and path.stat().st_mtime_ns <= limit.stat().st_mtime_ns
        except OSError:  # the file does not exist, or :meth:`load` reports the error
            return False

    def save(self, state: dict[str, Any]) -> None:
        if self.path is not None:
            save_state(self.path, state)


def key(run: Any, dataset: Dataset) -> str:
    """A digest of all that decides the first task of ``run``: see ``decides`` in :mod:`pycil_wsc.keys`.

    If ``device`` or ``precision`` is ``auto``, or ``threads`` is null, the value in use counts.
    """
    task, manager = run.manager.tasks[0], run.manager
    decisive, data, info = run.config.first_task(), run.data, dataset.info
    if dataset.arrivals:  # the data of later tasks do not matter
        data, info = data["tasks"][0], replace(info, classes=info.classes[: task.num_seen])
    decisive |= {"classes": manager.class_order[: task.num_seen], "data": data, "info": repr(info)}
    decisive |= {"weights": digest_of(run.config.pretrained) if isinstance(run.config.pretrained, str) else None}
    decisive |= {"device": device_name(run.device), "processes": run.processes.count}
    decisive |= {"threads": torch.get_num_threads() if run.device.type == "cpu" else None}
    decisive |= {"precision": run.learner.precision, "torch": torch.__version__, "code": code()}
    packages = ["numpy", "pillow", "torchvision", *(["timm"] if is_timm(run.config.convnet_type) else [])]
    decisive |= {"packages": [importlib.metadata.version(name) for name in packages]}
    decisive |= {"extensions": code_elsewhere(run)}
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


def code_elsewhere(run: Any) -> list[str]:
    """Digests of the other packages and modules that define the run's learner, backbone and optimiser."""
    config = run.config
    used = [*config.learner.__mro__, registry.backbones.get(config.convnet_type), registry.optimizers[config.optimizer]]
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
