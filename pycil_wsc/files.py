"""Atomic writing of files: under a temporary name in the same folder, then renamed. Also locks."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from pycil_wsc.errors import UserError


def write_atomically(path: str | Path, content: bytes | str, durable: bool = True) -> None:
    """Write ``content`` to ``path``. If the disk is full or the process dies, the previous file is unchanged.

    ``durable``: wait for the disk, so that this also holds if the power fails; otherwise the file may then be empty.
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
        with contextlib.suppress(OSError):  # no folder, or none that can be written: the first error is reported
            partial.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another folder with --out. "
            "What was saved before is intact"
        ) from None


def locked(folder: str | Path, name: str = ".lock", wait: bool = True) -> AcquireReturnProxy:
    """A context in which no other process holds the lock ``name`` of ``folder``.

    The lock is taken when this function is called and released at the end of the context.

    Raises ``Timeout`` if another process holds it and this one does not ``wait``.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return FileLock(Path(folder, name)).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder, "
            "with --out or --data-root if this is a command"
        ) from None


def write_json(path: str | Path, value: Any) -> None:
    """Write readable JSON: one key or item per line, but lists of numbers on one line."""
    text = json.dumps(value, indent=2)
    text = re.sub(r'\[\n\s*([^]["{}]*?)\n\s*\]', lambda numbers: "[" + re.sub(r"\n\s*", " ", numbers[1]) + "]", text)
    write_atomically(path, text + "\n")
