"""A training state as one safetensors file: the tensors under their paths, all else as JSON in its header. Whole or absent."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pycil_wsc.errors import UnusableRun, UserError

SEQUENCES = {"list": list, "tuple": tuple}


def save_state(path, state):
    """Write ``state``: dicts, lists and tuples of tensors, numbers, strings, booleans and None, nested at will."""
    tensors, path = {}, Path(path)
    header = json.dumps(_packed(state, "state", tensors))
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"state": header})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error}); free space or choose another folder with --out. What was saved before is intact"
        ) from None


def load_state(path):
    """What :func:`save_state` wrote, with the tensors on the CPU."""
    try:
        with safe_open(path, "pt") as file:
            return _unpacked(json.loads(file.metadata()["state"]), file)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UnusableRun(
            f"{path}: is not a checkpoint of this version ({type(error).__name__}); delete it to start this run again"
        ) from None


def _packed(value, path, tensors):
    """``value`` as JSON that tells dicts, lists, tuples and tensors apart; the tensors go into ``tensors``."""
    if hasattr(value, "data_ptr"):
        tensors[path] = value.detach().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(part, f"{path}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(part, f"{path}/{number}", tensors) for number, part in enumerate(value)]}
    return value


def _unpacked(value, file):
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "dict":
        return {key: _unpacked(part, file) for key, part in content}
    return SEQUENCES[kind](_unpacked(part, file) for part in content)
