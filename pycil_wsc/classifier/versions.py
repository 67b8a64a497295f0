"""Earlier versions of a saved learner: ``versions/<number>.safetensors`` beside ``learner.safetensors``.

A version is a hard link to the file that was the present one, so keeping it takes no time, and a copy where the disk
has no links. Every change of the folder is one link, one rename or one removal: a process that dies leaves the learner
before or after it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypedDict

from pycil_wsc.errors import UserError
from pycil_wsc.files import write_atomically
from pycil_wsc.state import State, peek_state

FILE = "learner.safetensors"
VERSIONS = "versions"


class Version(TypedDict):
    """A version that is kept: its number, whether it is the ``present`` one, its number of ``tasks``, its classes,
    ``when`` its last task was learned, and the ``bytes`` of its file, without copied images.
    """

    version: int
    present: bool
    tasks: int
    classes: list[str]
    when: str | None
    bytes: int


def find(folder: Path, number: int) -> Path:
    """The file of a version. Raises a :class:`UserError` if it is not kept."""
    if number_of(folder / FILE) == number:
        return folder / FILE
    known = kept(folder)
    if number not in known:
        numbers = ", ".join(map(str, sorted({*known, number_of(folder / FILE)} - {0}))) or "none"
        raise UserError(f"{folder}: has no version {number}; it has {numbers}")
    return known[number]


def kept(folder: Path) -> dict[int, Path]:
    """The files in ``versions/`` by their numbers, oldest first; the present version may be among them."""
    found = {}
    with contextlib.suppress(OSError):  # no folder
        for path in (folder / VERSIONS).iterdir():
            if path.suffix == ".safetensors" and path.stem.isdecimal():
                found[int(path.stem)] = path
    return dict(sorted(found.items()))


def number_of(path: Path) -> int:
    """The number of the version in a file; 0 if it has none, cannot be read or does not exist."""
    number = _peeked(path).get("version", 0)
    return number if type(number) is int and number > 0 else 0


def parent_of(folder: Path, number: int) -> int | None:
    """The number of the version that version ``number`` was learned from; None if that is not known."""
    present = folder / FILE
    path = present if number_of(present) == number else kept(folder).get(number)
    return _peeked(path).get("parent") if path else None


def next_number(folder: Path) -> int:
    """The number of the next version."""
    return 1 + max([0, number_of(folder / FILE), *kept(folder)])


def keep_present(folder: Path) -> None:
    """Keep the present file as a version, if there is one and it is not kept yet."""
    present = folder / FILE
    number = number_of(present)
    if not present.is_file() or number in kept(folder):
        return
    target = _path(folder, number)
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(present, target)
    except FileExistsError:
        return
    except OSError:  # the disk has no links
        write_atomically(target, present.read_bytes())


def remove_oldest(folder: Path, limit: int) -> None:
    """Remove versions until there are ``limit``, the present one included, which always stays.

    Those that the present one was not learned from are removed first, and each time the oldest.
    """
    present = number_of(folder / FILE)
    versions = kept(folder)
    line: list[int] = []
    parent = parent_of(folder, present)
    while parent in versions and parent not in line:
        line.append(parent)
        parent = parent_of(folder, parent)
    earlier = sorted(versions.keys() - {present}, key=lambda number: (number in line, number))
    for number in earlier[: max(0, len(earlier) - (limit - 1))]:
        versions[number].unlink()
    with contextlib.suppress(OSError):  # it has versions
        (folder / VERSIONS).rmdir()


def files_of_all(folder: Path) -> set[str] | None:
    """The names of the image files that any version refers to; None if a version cannot tell."""
    names: set[str] = set()
    for path in (folder / FILE, *kept(folder).values()):
        content = _peeked(path)
        if not content:
            return None
        parts = content.get("exemplars", {}), content.get("ledger", {}).get("held_out", {})
        names.update(name for part in parts for name in part.get("files", ()))
    return names


def one_before(folder: Path) -> int:
    """The number of the version that the present one was learned from; if that is not known or kept, the previous one.

    Raises a :class:`UserError` if there is none.
    """
    present = number_of(folder / FILE)
    versions = kept(folder)
    earlier = [number for number in versions if number < present]
    if not earlier:
        raise UserError(f"{folder}: has no version before {present or 'the present one'} to go back to")
    parent = parent_of(folder, present)
    return parent if parent in earlier else earlier[-1]


def make_present(folder: Path, number: int) -> None:
    """Make this version the present one; that one is kept."""
    keep_present(folder)
    write_atomically(folder / FILE, kept(folder)[number].read_bytes())


def listed(folder: Path) -> list[Version]:
    """What is kept, oldest first."""
    present = folder / FILE
    number = number_of(present)
    files = kept(folder) | ({number: present} if present.is_file() else {})
    found = []
    for each, path in sorted(files.items()):
        content = _peeked(path)
        if not {"config", "info"} <= content.keys():  # not a learner
            continue
        entries = content.get("ledger", {}).get("entries", ())
        version = Version(
            version=each,
            present=each == number,
            tasks=len(content["config"]["tasks"]),
            classes=list(content["info"]["classes"]),
            when=entries[-1].get("when") if entries else None,
            bytes=path.stat().st_size,
        )
        found.append(version)
    return found


def signature(folder: Path) -> tuple[int, int, int] | None:
    """What changes when another version becomes the present one; None if there is none."""
    try:
        status = os.stat(folder / FILE)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _path(folder: Path, number: int) -> Path:
    return folder / VERSIONS / f"{number:06}.safetensors"


def _peeked(path: Path) -> State:
    """The values in a file; empty if it cannot be read."""
    try:
        content = peek_state(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
