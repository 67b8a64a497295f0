"""Which of the Trainer's checkpoints a stopped run resumes from.

The Trainer writes a checkpoint's files one after the other into a folder, and execution may end between any two.
``checkpoint.json`` names the last whole one. It has the SHA-256 of its files, since safetensors and torch take damaged
tensors as they are, and what the run itself needs to resume.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pycil_wsc.errors import UnusableRun
from pycil_wsc.files import write_json
from pycil_wsc.llm.config import CHECKPOINT, CHECKPOINTS

PARTS = {"checkpoint", "files", "state", "identity", "data"}


def record(run: Path, checkpoint: Path, state: dict[str, Any]) -> None:
    """Make ``checkpoint``, a folder, the one that ``run`` resumes from, with ``state``; earlier ones are removed."""
    write_json(run / CHECKPOINT, {"checkpoint": checkpoint.name, "files": _digests(checkpoint), **state})
    for other in checkpoint.parent.iterdir():
        if other != checkpoint:
            shutil.rmtree(other, ignore_errors=True)


def recorded(run: Path) -> dict[str, Any] | None:
    """What :func:`record` wrote, if anything. Raises :class:`UnusableRun` if the checkpoint was damaged since."""
    path = run / CHECKPOINT
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        whole = found.keys() >= PARTS
    except (ValueError, AttributeError):
        whole = False
    if not whole:
        raise UnusableRun(f"{path}: is not a checkpoint of this version; delete it to start this run again")
    folder = run / CHECKPOINTS / found["checkpoint"]
    if _digests(folder) != found["files"]:
        raise UnusableRun(f"{folder}: is damaged (a checksum is wrong); delete {path} to start this run again")
    return found


def remove(run: Path) -> None:
    """Remove the checkpoints of a finished run."""
    shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
    (run / CHECKPOINT).unlink(missing_ok=True)


def _digests(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of the files in a folder."""
    digests = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
        digests[path.name] = digest.hexdigest()
    return digests
