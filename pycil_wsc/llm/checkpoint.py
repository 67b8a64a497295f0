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
from pycil_wsc.state import packed, unpacked


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``, of which :func:`~pycil_wsc.state.packed` says what it may contain."""
    tensors: dict[str, Tensor] = {}
    header = json.dumps(packed(state, tensors))
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(
            tensors, partial, metadata={"content": header, "sha256": _digest(header, tensors, tensors.__getitem__)}
        )
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
    """Raise :class:`UnusableRun` if what :func:`save_state` wrote was damaged since."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header["sha256"] != _digest(header["content"], file.keys(), file.get_tensor):
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
    def tensor_of(name):
        stored = file.get_slice(name)
        return stored if stored.get_shape() else file.get_tensor(name)

    try:
        return unpacked(json.loads(file.metadata()["content"]), tensor_of)
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> UnusableRun:
    return UnusableRun(
        f"{path}: is not a checkpoint of this version ({type(error).__name__}); delete it to start this run again"
    )
