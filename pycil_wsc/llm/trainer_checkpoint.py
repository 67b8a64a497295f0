"""Which of the Trainer's checkpoints a stopped run resumes from.

The Trainer writes a checkpoint's files one after the other into a folder, and execution may end between any two.
``checkpoint.json`` names the last whole one. It has the SHA-256 of its files, since safetensors and torch take damaged
tensors as they are, and what the run itself needs to resume.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pycil_wsc.config.kinds import run_folder
from pycil_wsc.errors import UnusableRun
from pycil_wsc.files import opened, read_file, write_json
from pycil_wsc.llm.config import CHECKPOINT, CHECKPOINTS, LLMConfig
from pycil_wsc.runs.checkpoint import checked

PARTS = {
    *("checkpoint", "files", "model", "history", "curves", "clock", "counts"),
    *("epoch_loss", "peak_memory", "sharded"),
}


def record(run: Path, checkpoint: Path, state: Mapping[str, object]) -> None:
    """Make ``checkpoint``, a folder, the one that ``run`` resumes from, with ``state``; earlier ones are removed."""
    _flush(checkpoint)
    write_json(run / CHECKPOINT, {"checkpoint": checkpoint.name, "files": _digests(checkpoint), **state})
    for other in checkpoint.parent.iterdir():
        if other != checkpoint:
            shutil.rmtree(other, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until the files in ``folder`` are on the disk, so that they are whole, too, if the power fails."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def recorded(config: LLMConfig, data: dict[str, int | str], model: str) -> dict[str, Any] | None:
    """What :func:`record` wrote, if anything.

    Raises :class:`UnusableRun` if the checkpoint was damaged since, or made with another configuration, other data or
    another model; ``model``: the :func:`digest` of its weights before training.
    """
    run = run_folder(config)
    state = None
    path = run / CHECKPOINT
    if not path.exists():
        return None
    with contextlib.suppress(ValueError):
        state = json.loads(read_file(path))
    state = checked(state, path, PARTS, config, data)
    if state["model"] != model:
        raise UnusableRun(
            f"{path}: the weights of llm.model '{config.model}' are not those with which this run began; put them "
            "back, or delete the file to start this run again"
        )
    folder = run / CHECKPOINTS / state["checkpoint"]
    if _digests(folder) != state["files"]:
        raise UnusableRun(f"{folder}: is damaged (a checksum is wrong); delete {path} to start this run again")
    return state


def remove(run: Path) -> None:
    """Remove the checkpoints of a finished run."""
    shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
    (run / CHECKPOINT).unlink(missing_ok=True)


def digest(model: nn.Module) -> str:
    """A hash of the weights of ``model``, which are on the CPU."""
    hashed = hashlib.sha256()
    for name, weight in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(weight.contiguous().view(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()[:16]


def _digests(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of the files in a folder."""
    digests = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        digest = hashlib.sha256()
        with opened(path) as file:
            while block := file.read(1 << 24):
                digest.update(block)
        digests[path.name] = digest.hexdigest()
    return digests
