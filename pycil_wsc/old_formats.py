"""Reads what earlier versions saved. Nothing here writes, and nothing in the files is executed."""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from pycil_wsc.state import unpacked

LEARNER = ("weights.safetensors", "exemplars.json", "exemplars.npy")  # learner.json has their checksums


def has_learner(folder: Path) -> bool:
    """Whether ``folder`` has a saved learner of format 1."""
    return os.path.isfile(folder / "learner.json")


def load_learner(folder: Path) -> dict[str, Any]:
    """A saved learner of format 1, in the form of the present one. Raises many kinds of exceptions if it is damaged."""
    content = json.loads((folder / "learner.json").read_bytes())
    if content["version"] != 1:
        return {"format": content["version"]}
    sums = content.pop("sha256")
    files = {name: (folder / name).read_bytes() for name in LEARNER if name in sums}
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
