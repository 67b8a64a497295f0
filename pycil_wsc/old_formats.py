"""Reads what earlier versions saved. Nothing here writes, and nothing in the files is executed."""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from pycil_wsc import state
from pycil_wsc.files import opened, read_file
from pycil_wsc.state import State, unpacked

LEARNER = ("weights.safetensors", "exemplars.json", "exemplars.npy")  # learner.json has their checksums


def load_state(path: str | Path) -> State:
    """:func:`pycil_wsc.state.load_state`, also of files that ``torch.save`` wrote, as up to version 0.2.0.

    These are checkpoints, shared first tasks and weights. Raises the same errors.
    """
    with opened(path) as file:
        zipped = file.read(2) == b"PK"
    return _load_tensors(path) if zipped else state.load_state(path)


def _load_tensors(path: str | Path) -> State:
    """What ``torch.save`` wrote, on the CPU; nothing in the file is executed.

    ``torch.load`` does not detect damaged tensors, so the checksum of every part of the archive is verified first.
    """
    content = read_file(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            refuse_compressed(archive, len(content))
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of its part {damaged} is wrong")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (MemoryError, ValueError):
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # the unpickler raises many kinds of errors
        raise ValueError(type(error).__name__) from None


def refuse_compressed(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ``ValueError`` if the parts of an archive of ``size`` bytes take more: torch compresses nothing.

    A small file could otherwise take all memory.
    """
    if sum(part.file_size for part in archive.infolist()) > size:
        raise ValueError("it is compressed, unlike what torch writes")


def has_learner(folder: Path) -> bool:
    """Whether ``folder`` has a saved learner of format 1."""
    return os.path.isfile(folder / "learner.json")


def load_learner(folder: Path) -> State:
    """A saved learner of format 1, in the form of the present one. Raises many kinds of exceptions if it is damaged."""
    content = json.loads(read_file(folder / "learner.json"))
    if content["version"] != 1:
        return {"format": content["version"]}
    sums = content.pop("sha256")
    files = {name: read_file(folder / name) for name in LEARNER if name in sums}
    files["learner.json"] = json.dumps(content, sort_keys=True).encode()
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise ValueError(f"the checksum of {name} is wrong")
    exemplars = json.loads(files["exemplars.json"])
    if "files" in exemplars:
        exemplars["sha256"] = [None] * len(exemplars["files"])
    else:
        exemplars["pixels"] = np.load(io.BytesIO(files["exemplars.npy"]), allow_pickle=False)
    tensors = safetensors.torch.load(files["weights.safetensors"])
    facts = {name: content[name] for name in ("config", "info", "seen", "data")}
    return {"format": 1, **facts, "exemplars": exemplars, "run": unpacked(content["state"], tensors.__getitem__)}


def remove_learner(folder: Path) -> None:
    """Remove a saved learner of format 1, which was saved again."""
    if has_learner(folder):
        for name in (*LEARNER, "learner.json"):
            (folder / name).unlink(missing_ok=True)
