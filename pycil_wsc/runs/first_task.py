"""The first task, trained once for all runs that share it.

It depends on the data, the class order, the backbone, the schedule and the seed, but neither on the memory nor, where it is
cross-entropy alone, on the method. What was trained is kept under a key of all that decides it, the code included, so that a
run that takes it from here ends with the numbers, to the bit, that it would have had.
"""

import contextlib
import functools
import hashlib
import json
import logging
from pathlib import Path

import torch
from filelock import Timeout

from pycil_wsc.files import load_tensors, locked, save_tensors

SCHEDULE = (
    "init_epoch",
    "init_lr",
    "init_milestones",
    "init_lr_decay",
    "init_weight_decay",
    "scheduler",
    "momentum",
    "batch_size",
)
DECISIVE = ("seed", "convnet_type", *SCHEDULE)


@contextlib.contextmanager
def shared(run, dataset):
    """The entry of ``run``'s first task, held by this process: while one trains it, others that want it wait."""
    path = Path(run.config.out, "first_tasks", f"{key(run, dataset)}.pt")
    lock = f".{path.name}.lock"
    try:
        held = locked(path.parent, lock, wait=False)
    except Timeout:
        run.bar.say("waits for the first task, which another run is training")
        held = locked(path.parent, lock)
    with held:
        yield Entry(path)


class Entry:
    """A file that holds what training the first task gave, or will."""

    def __init__(self, path):
        self.path = path

    def load(self):
        """What was saved, or None. A file that is damaged is as good as none, and is written again."""
        if not self.path.exists():
            return None
        try:
            return load_tensors(self.path)
        except (OSError, ValueError) as error:
            logging.getLogger("pycil_wsc").warning(
                "%s: is damaged (%s); the first task is trained again", self.path, error
            )
            return None

    def save(self, state):
        save_tensors(self.path, state)


def key(run, dataset):
    """A digest of all that decides the first task of ``run``."""
    task, manager, config = run.manager.tasks[0], run.manager, run.config
    decisive = {name: getattr(config, name) for name in DECISIVE}
    decisive |= {
        "classes": manager.class_order[: task.num_seen],
        "data": run.data,
        "info": repr(dataset.info),
        "held_out": config.validation_split,
        "cache_images": config.cache_images,
        "device": run.device.type,
    }
    decisive |= (
        {"threads": torch.get_num_threads()}
        if run.device.type == "cpu"
        else {"deterministic": config.deterministic, "cuda_graph": config.cuda_graph}
    )
    decisive |= {"precision": run.learner.precision, "torch": torch.__version__, "code": code()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:20]


@functools.cache
def code():
    """A digest of the source that computes."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(
        path
        for folder in ("data", "networks", "engine", "learners", "consolidation")
        for path in (root / folder).rglob("*.py")
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()
