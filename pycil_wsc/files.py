"""Files that are whole or absent: written beside their place, then renamed into it."""

import contextlib
import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pycil_wsc.errors import UserError

RESULT_SCHEMA = 1  # of result.json: counts up when a reader of the version before would misread it


def write_atomically(path: str | Path, content: bytes | str, durable: bool = True) -> None:
    """Write ``content`` to ``path``. What stood there stays whole if the disk is full or the process dies.

    ``durable``: also if the power fails, for which the disk is waited for. Otherwise an empty file may then be left.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        try:
            partial.unlink(missing_ok=True)
        except OSError:
            pass  # the folder itself cannot be written or is no folder: the first error tells
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another folder with --out. "
            "What was saved before is intact"
        ) from None


def locked(folder: str | Path, name: str = ".lock", wait: bool = True) -> contextlib.AbstractContextManager:
    """A context in which no other process holds the lock ``name`` of ``folder``.

    Raises ``Timeout`` if one does and this one does not ``wait``.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(folder, name)).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with --out or --data-root"
        ) from None


def write_json(path: str | Path, value: Any) -> None:
    """JSON to be read: a key or item a line, but a list of numbers on one line."""
    text = json.dumps(value, indent=2)
    text = re.sub(r'\[\n\s*([^]["{}]*?)\n\s*\]', lambda numbers: "[" + re.sub(r"\n\s*", " ", numbers[1]) + "]", text)
    write_atomically(path, text + "\n")


def save_tensors(path: str | Path, state: Any) -> None:
    """``torch.save``, atomically, and with a full disk reported as any other."""
    import torch  # takes seconds, and most who write files have no tensors

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def load_tensors(path: str | Path) -> Any:
    """What :func:`save_tensors` wrote, on the CPU; nothing in the file is executed.

    ``torch.load`` takes damaged tensors as they are. Here the checksum of every part of the archive is compared first.
    Raises ``OSError`` where the file cannot be read, and ``ValueError`` where it is damaged or of another kind.
    """
    import torch

    content = Path(path).read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of its part {damaged} is wrong")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None
    except ValueError:
        raise
    except Exception as error:  # whatever an unpickler finds
        raise ValueError(type(error).__name__) from None
