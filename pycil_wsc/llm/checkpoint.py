"""A training state as one safetensors file, written atomically.

Tensors are stored under their paths; everything else is JSON in the header. So is the SHA-256 of it all: safetensors
takes damaged tensors as they are.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pycil_wsc.errors import UnusableRun, UserError

SEQUENCES = {"list": list, "tuple": tuple}


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``: dicts, lists and tuples of tensors, numbers, strings, booleans and None, nested at will."""
    tensors: dict[str, Any] = {}
    header = json.dumps(_packed(state, "state", tensors))
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"state": header, "sha256": _digest(header, tensors, tensors.__getitem__)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error}); free space or choose another folder with --out. "
            "What was saved before is intact"
        ) from None


def verify_state(path: Path) -> None:
    """Raise :class:`UnusableRun` if what :func:`save_state` wrote was damaged since.

    Files of versions that wrote no checksum are accepted.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if "sha256" in header and header["sha256"] != _digest(header["state"], file.keys(), file.get_tensor):
                raise UnusableRun(f"{path}: is damaged (its checksum is wrong); delete it to start this run again")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unusable(path, error) from None


def _digest(header: str, names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> str:
    """The SHA-256 of the header and of the tensors: their names, types, shapes and bytes."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(names):
        tensor = tensor_of(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def open_state(path: Path) -> Iterator[Any]:
    """Open what :func:`save_state` wrote: tensors as slices of the file, read when indexed; numbers as tensors.

    The checksum is not compared: see :func:`verify_state`.
    """
    try:
        with safe_open(path, "pt") as file:
            yield _opened(path, file)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, error) from None


def _opened(path: Path, file: Any) -> Any:
    try:
        return _unpacked(json.loads(file.metadata()["state"]), file)
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> UnusableRun:
    return UnusableRun(
        f"{path}: is not a checkpoint of this version ({type(error).__name__}); delete it to start this run again"
    )


def _packed(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """``value`` as JSON that tells dicts, lists, tuples and tensors apart; the tensors go into ``tensors``."""
    if hasattr(value, "data_ptr"):
        tensors[path] = value.detach().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(part, f"{path}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(part, f"{path}/{number}", tensors) for number, part in enumerate(value)]}
    return value


def _unpacked(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        stored = file.get_slice(content)
        return stored if stored.get_shape() else file.get_tensor(content)
    if kind == "dict":
        return {key: _unpacked(part, file) for key, part in content}
    return SEQUENCES[kind](_unpacked(part, file) for part in content)
