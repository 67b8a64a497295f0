"""Earlier versions of a saved learner: ``versions/<number>.safetensors`` beside ``learner.safetensors``.

A version is a hard link to the file that was the present one, so keeping it takes no time, and a copy where the disk
has no links. Every change of the folder is one link, one rename or one removal: a process that dies leaves the learner
before or after it.

``.last_version`` has the highest number so far, so that no number is used twice, even if the file that had it is
damaged.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

from pycil_wsc.classifier.store.parts import size_of
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file, write_atomically
from pycil_wsc.state import State, names_of_parts, peek_state

FILE = "learner.safetensors"
VERSIONS = "versions"
LAST = ".last_version"


class Version(TypedDict):
    """A version that is kept: its number, whether it is the ``present`` one, its number of ``tasks``, its classes,
    ``when`` its last task was learned, and the ``bytes`` of its file and of its parts, which other versions may share,
    without copied images.
    """

    version: int
    present: bool
    tasks: int
    classes: list[str]
    when: str | None
    bytes: int


class Outline(NamedTuple):
    """What the file of a version tells without its tensors and its checksum.

    ``number``: its own; ``parent``: that of the version it was learned from, if known;
    ``tasks``: their names; ``when``: as in :class:`Version`; ``files``: the names of the image files that it refers to;
    ``parts``: those of its parts (:mod:`pycil_wsc.classifier.store.parts`).
    """

    number: int
    parent: int | None
    tasks: list[str]
    classes: list[str]
    when: str | None
    files: set[str]
    parts: set[str]


def find(folder: Path, number: int) -> Path:
    """The file of a version. Raises a :class:`UserError` if it is not kept."""
    if number_of(folder / FILE) == number:
        return folder / FILE
    known = kept(folder)
    if number not in known:
        numbers = ", ".join(map(str, sorted({*known, number_of(folder / FILE)} - {0}))) or "none"
        damage = f"; its present version, {FILE}, is damaged" if is_damaged(folder) else ""
        raise UserError(f"{folder}: has no version {number}; it has {numbers}{damage}")
    return known[number]


def kept(folder: Path) -> dict[int, Path]:
    """The files in ``versions/`` by their numbers, oldest first; the present version may be among them."""
    return {number: path for number, path in _numbered(folder).items() if path.is_file()}


def _numbered(folder: Path) -> dict[int, Path]:
    """What has the name of a version in ``versions/``, by number, in order; a received folder may have pipes there."""
    paths = {}
    with contextlib.suppress(OSError):  # no folder
        for path in (folder / VERSIONS).iterdir():
            if path.suffix == ".safetensors" and path.stem.isdecimal():
                paths[int(path.stem)] = path
    return dict(sorted(paths.items()))


def number_of(path: Path) -> int:
    """The number of the version in a file; 0 if it cannot be read or does not exist."""
    outline = _outline_of(path)
    return outline.number if outline else 0


def parent_of(folder: Path, number: int) -> int | None:
    """The number of the version that version ``number`` was learned from; None if that is not known."""
    present = folder / FILE
    path = present if number_of(present) == number else kept(folder).get(number)
    outline = _outline_of(path) if path else None
    return outline.parent if outline else None


def is_damaged(folder: Path) -> bool:
    """Whether there is a present version of which not even the outline can be read."""
    present = folder / FILE
    return os.path.lexists(present) and _outline_of(present) is None


def next_number(folder: Path, known: int = 0) -> int:
    """The number of the next version, which no version has had; ``known``: one that has been used."""
    highest = max([known, _last_number(folder), number_of(folder / FILE), *_numbered(folder)])
    return 1 + highest


def note_number(folder: Path, number: int) -> None:
    """Note that ``number`` is used, before a version has it."""
    write_atomically(folder / LAST, f"{number}\n")


def _last_number(folder: Path) -> int:
    """The highest number that was noted; 0 if there is none, or the note is damaged."""
    try:
        return max(0, int(read_file(folder / LAST)))
    except (OSError, ValueError):
        return 0


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
        write_atomically(target, read_file(present))


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


def used_by_any(folder: Path) -> tuple[set[str], set[str]] | None:
    """The names of the image files and of the parts that any version refers to; None if a version cannot tell."""
    files: set[str] = set()
    parts: set[str] = set()
    for path in (folder / FILE, *kept(folder).values()):
        outline = _outline_of(path)
        if outline is None:
            return None
        files |= outline.files
        parts |= outline.parts
    return files, parts


def one_before(folder: Path) -> int:
    """The number of the version that the present one was learned from; if that is not known or kept, the previous one.

    Raises a :class:`UserError` if there is none, or if the present one is damaged.
    """
    versions = kept(folder)
    if is_damaged(folder):
        others = ", ".join(str(number) for number in versions if number) or "none"
        raise UserError(
            f"{folder}: its present version, {FILE}, is damaged; save this learner again, or load another version "
            f"(kept: {others})"
        )
    present = number_of(folder / FILE)
    earlier = [number for number in versions if number < present]
    if not earlier:
        raise UserError(f"{folder}: has no version before {present or 'the present one'} to go back to")
    parent = parent_of(folder, present)
    return parent if parent in earlier else earlier[-1]


def make_present(folder: Path, number: int) -> None:
    """Make this version the present one; that one is kept."""
    keep_present(folder)
    write_atomically(folder / FILE, read_file(kept(folder)[number]))


def listed(folder: Path) -> list[Version]:
    """What is kept, oldest first."""
    present = folder / FILE
    number = number_of(present)
    files = kept(folder) | ({number: present} if present.is_file() else {})
    versions = []
    for kept_number, path in sorted(files.items()):
        outline = _outline_of(path)
        if outline is None:  # damaged, or not a learner
            continue
        version = Version(
            version=kept_number,
            present=kept_number == number,
            tasks=len(outline.tasks),
            classes=list(outline.classes),
            when=outline.when,
            bytes=path.stat().st_size + size_of(folder, outline.parts),
        )
        versions.append(version)
    return versions


def signature(folder: Path) -> tuple[int, int, int] | None:
    """What changes when another version becomes the present one; None if there is none."""
    try:
        status = os.stat(folder / FILE)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _path(folder: Path, number: int) -> Path:
    return folder / VERSIONS / f"{number:06}.safetensors"


def _outline_of(path: Path) -> Outline | None:
    """What a file tells of the version in it; None if it is damaged or not a learner's."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _outline_in(File((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size), path))


@dataclass(frozen=True)
class File:
    """A file by its ``signature``, which all links to it share, and the ``path`` at which it is now."""

    signature: tuple[int, ...]
    path: Path = field(compare=False)


@functools.lru_cache(maxsize=16)  # a save asks for those of all versions several times
def _outline_in(file: File) -> Outline | None:
    """The same of this ``file``."""
    try:
        content = peek_state(file.path, without="run")
        number, parent = numbers_in(content)
        tasks, classes = content["config"]["tasks"], content["info"]["classes"]
        bookkeeping = content["ledger"]
        files = [name for part in (content["exemplars"], bookkeeping["held_out"]) for name in part.get("files", ())]
        when = bookkeeping["entries"][-1].get("when") if bookkeeping["entries"] else None
        if not all(isinstance(name, str) for name in [*tasks, *classes, *files, when or ""]):
            return None
        return Outline(number, parent, list(tasks), list(classes), when, set(files), set(names_of_parts(file.path)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def numbers_in(content: State) -> tuple[int, int | None]:
    """The version and its parent in the content of a file; raises ``ValueError`` if they are no such numbers."""
    number, parent = content["version"], content["parent"]
    if type(number) is not int or number < 1:
        raise ValueError("its number is not one of a version")
    if parent is not None and (type(parent) is not int or parent < 1):
        raise ValueError("the number that it was learned from is not one of a version")
    return number, parent
