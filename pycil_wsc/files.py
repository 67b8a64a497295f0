"""Reading of files, and atomic writing: under a temporary name in the same folder, then renamed. Also locks."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from filelock import AcquireReturnProxy, FileLock, Timeout

from pycil_wsc.errors import Unwritable, UserError

Json: TypeAlias = Any  # a JSON value: what it has within is checked where it is read, not by its type
NO_FILE = "not a file but a pipe or a device"
LARGEST_JSON = 1 << 30  # bytes of a JSON file


def check_file(path: str | Path) -> os.stat_result:
    """The status of a file that is to be opened.

    Raises ``OSError`` if there is none, and for a pipe or a device: to open a pipe would wait for ever, and a device
    may have no end. A folder from elsewhere, such as a received learner, may have them in place of files.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # to open a folder fails anyway
        raise OSError(errno.EINVAL, NO_FILE, os.fspath(path))
    return status


def opened(path: str | Path) -> BinaryIO:
    """The file, open for reading; raises ``OSError``, also for what :func:`check_file` refuses."""
    check_file(path)
    return open(path, "rb")


def read_file(path: str | Path) -> bytes:
    """The content of a file; raises ``OSError``, also for what :func:`check_file` refuses."""
    with opened(path) as file:
        return file.read()


def working_folder() -> str:
    """The working folder; in words if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return "the working folder, which has been removed"


def absolute(path: str | Path) -> Path:
    """``path`` from the root, with which it holds in whichever folder the process will be.

    Raises a :class:`UserError` for a relative one if the working folder has been removed.
    """
    try:
        return Path(path).absolute()
    except OSError as error:
        raise UserError(
            f"{path}: the working folder, in which this path begins, is gone ({error.strerror}); give the path from /"
        ) from None


PLACE = "\0"  # where a parser stopped, in the patterns of :data:`HINTS`
HINTS = {  # what to do about invalid JSON
    r",\s*\0\s*[}\]]": "leave out the comma after the last item",
    r"\0\s*,\s*[}\]]": "leave out the comma after the last item",
    r"(\d+),\0(\d+)": r"write a decimal point: \1.\2",
    r"(\d+),(0+)\0(\d+)": r"write a decimal point: \1.\2\3",
    r"\0\s*'": "write strings in double quotes",
    r"\0\s*(//|#|/\*)": "leave out the comment, which JSON does not have",
    r"\0\s*True": "write true",
    r"\0\s*False": "write false",
    r"\0\s*None": "write null",
}


def write_atomically(path: str | Path, content: bytes | str, durable: bool = True) -> None:
    """Write ``content`` to ``path``. If the disk is full or the process dies, the previous file is unchanged.

    ``durable``: wait for the disk, so that this also holds if the power fails; otherwise the file may then be empty.
    """
    write_together({Path(path): content}, durable)


def write_together(contents: Mapping[Path, bytes | str], durable: bool = True) -> None:
    """Write several files, in their order, as :func:`write_atomically` writes one.

    All are complete on the disk before the first one replaces its predecessor, so that an error leaves all of these.
    """
    partials = {path: path.with_name(f".{path.name}.partial") for path in contents}
    path = next(iter(contents))
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partials[path].unlink(missing_ok=True)  # left by a process that was killed, or a link to another file
            with open(partials[path], "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        for path in contents:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        for path, partial in partials.items():
            os.replace(partial, path)
    except OSError as error:
        for partial in partials.values():
            with contextlib.suppress(OSError):  # no folder, or none that can be written: the first error is reported
                partial.unlink(missing_ok=True)
        raise Unwritable(
            f"{path}: cannot be written ({error.strerror}); free space or choose another folder with --out. "
            "What was saved before is intact"
        ) from None


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of ``folder`` at the end, unless there is an error."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except OSError as error:
        raise Unwritable(
            f"{folder}: cannot be written ({error}); free space or choose another folder with --out"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
        raise Unwritable(
            f"{folder}: cannot be written ({error.strerror}); choose another folder, "
            "with --out or --data-root if this is a command"
        ) from None


def locked_if_writable(folder: str | Path, name: str, wait: bool = True) -> contextlib.AbstractContextManager:
    """:func:`locked`, or no lock where the folder cannot be written, and so nothing can be lost."""
    try:
        return locked(folder, name, wait)
    except Unwritable:
        return contextlib.nullcontext()


def read_json(path: str | Path) -> Json:
    """The value in a JSON file. Raises a :class:`UserError` with the path for a file that cannot be read or parsed."""
    try:
        with open(path, "rb") as file:  # also a pipe, as of `--config <(command)`
            content = file.read(LARGEST_JSON + 1)
        if len(content) > LARGEST_JSON:
            raise UserError(f"more than {LARGEST_JSON >> 30} GB; give a smaller file")
        return json.loads(content, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {_json_hint(error) or 'correct the file'}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name an existing JSON file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); correct the file") from None


def _json_hint(error: json.JSONDecodeError) -> str:
    """What to do about a frequent mistake, at the place of the ``error``; empty for another one."""
    near = error.doc[max(0, error.pos - 40) : error.pos] + PLACE + error.doc[error.pos : error.pos + 40]
    for pattern, hint in HINTS.items():
        if match := re.search(pattern, near):
            return match.expand(hint)
    return ""


def _without_repeats(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """The object with these ``pairs`` of names and values, each name once."""
    values = {}
    for name, value in pairs:
        if name in values:
            raise UserError(f"'{name}' is given twice; leave one of the two out")
        values[name] = value
    return values


def write_json(path: str | Path, value: Json) -> None:
    """Write :func:`readable_json` to ``path``."""
    write_atomically(path, readable_json(value))


def readable_json(value: Json) -> str:
    """JSON with one key or item per line, but lists of numbers on one line."""
    text = json.dumps(value, indent=2)
    text = re.sub(r'\[\n\s*([^]["{}]*?)\n\s*\]', lambda numbers: "[" + re.sub(r"\n\s*", " ", numbers[1]) + "]", text)
    return text + "\n"
