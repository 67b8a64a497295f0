"""Many finished runs in one file, a line of JSON each: small to keep, and a sweep goes on where the file ends.

A file whose name ends in ``.xz`` is compressed, to a fifth. It is read line by line, as a small file may hold more than
the memory.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import BaseModel, ConfigDict

from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import absolute, locked, opened, read_file, write_atomically, write_json
from pycil_wsc.results.store import ANALYSES, RESULT, Problem, Record, find_runs

COMPRESSED = ".xz"
LARGEST = 1 << 30  # bytes of all lines, uncompressed
LONGEST = 1 << 26  # bytes of a line


class PackedRun(BaseModel):
    """A line: the folder of a run below that of its sweep, its result, and the lines of its analyses."""

    model_config = ConfigDict(strict=True, extra="forbid")

    folder: str
    result: dict[str, Any]
    analyses: list[dict[str, Any]] = []

    @property
    def prefix(self) -> object:
        return self.result["config"].get("prefix")


def pack(runs: Path, file: Path) -> tuple[int, list[Problem]]:
    """Write the finished runs below the folder ``runs`` into ``file``, beside those that it has.

    Returns the number of runs in ``file``, and the results that could not be read.

    A run that ``file`` has and that is below ``runs`` too is replaced. Raises a :class:`UserError` if there is nothing
    to pack, if ``file`` is not of this kind, or if it has another sweep's run in a folder of the same name.
    """
    file = absolute(file).resolve()  # of a link, the file that it leads to
    if not runs.is_dir():
        raise UserError(f"{runs}: is not a folder; give that of a sweep, runs/<prefix>")
    found = find_runs([runs])
    finished = []
    for record in (*found.records, *found.language):
        if record.path is not None and record.path.name == RESULT:
            finished.append(record)
    if not finished:
        raise UserError(f"{runs}: no finished run found; give the folder of a sweep, runs/<prefix>")
    with locked(file.parent):
        packed = {run.folder: run for run in lines(file)} if file.exists() else {}
        for record in finished:
            assert record.path
            folder = record.path.parent.relative_to(runs).as_posix()
            prefix = str(record.config.get("prefix"))
            if folder.startswith(f"{prefix}/"):
                raise UserError(f"{runs}: is the folder of all sweeps; give that of one, {runs / prefix}")
            run = PackedRun(folder=folder, result=json.loads(read_file(record.path)), analyses=record.analyses)
            other = packed.get(folder, run).prefix
            if run.prefix != other:
                raise UserError(f"{file}: has runs of the sweep '{other}'; give each sweep a file of its own")
            packed[folder] = run
        kept = [packed[folder].model_dump(exclude_defaults=True) for folder in sorted(packed)]
        text = "".join(json.dumps(run) + "\n" for run in kept)
        if len(text) > LARGEST:
            raise UserError(f"{file}: would have more than {LARGEST >> 30} GB; pack into several files")
        write_atomically(file, lzma.compress(text.encode()) if file.suffix == COMPRESSED else text)
    return len(packed), found.problems


def _can_be_a_path(folder: str) -> bool:
    try:
        parts = os.fsencode(folder).split(b"/")
    except UnicodeEncodeError:
        return False
    return b"\0" not in folder.encode(errors="replace") and max(map(len, parts)) < 256


def unpack(file: Path, runs: Path) -> tuple[int, int]:
    """Write the runs of ``file`` into folders below ``runs``, where a sweep and a report take them for finished.

    A folder that has a whole result keeps it. Returns the numbers of runs written and kept.
    """
    written = kept = 0
    for _ in lines(file):  # all are checked before the first is written
        pass
    with locked(runs):
        for run in lines(file):
            folder = runs / run.folder
            if _has_whole_result(folder):
                kept += 1
                continue
            if run.analyses:
                write_atomically(folder / ANALYSES, "".join(json.dumps(line) + "\n" for line in run.analyses))
            write_json(folder / RESULT, run.result)  # last, since it says that the run has finished
            written += 1
    return written, kept


def _has_whole_result(folder: Path) -> bool:
    """Whether the folder has a result that is whole JSON, by whichever version."""
    try:
        json.loads(read_file(folder / RESULT))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return True


def lines(file: Path) -> Iterator[PackedRun]:
    """The runs of a packed ``file``; raises a :class:`UserError` that names the first line that is not a run.

    Also if the file has more than ``LARGEST`` bytes, or a line more than ``LONGEST``: it is then not of this kind.
    """
    for number, line in enumerate(_raw_lines(file), 1):
        if len(line) > LONGEST:
            raise UserError(f"{file}: line {number} is not a finished run; restore the file")
        try:
            run = PackedRun.model_validate(json.loads(line))  # which knows names that are not UTF-8, unlike pydantic's
            Record.of(run.result, file)
        except (ValueError, RecursionError, UnusableRun):  # a ValidationError is a ValueError
            raise UserError(f"{file}: line {number} is not a finished run; restore the file") from None
        if Path(run.folder).is_absolute() or ".." in Path(run.folder).parts:
            raise UserError(f"{file}: line {number} names a folder outside the sweep's ({run.folder})")
        if not _can_be_a_path(run.folder):
            raise UserError(f"{file}: line {number} names a folder that cannot exist; restore the file")
        yield run


def _raw_lines(file: Path) -> Iterator[str]:
    """The lines of a file, uncompressed, of a line that is too long its beginning."""
    size = 0
    try:
        with opened(file) as content:
            stream = content
            if file.suffix == COMPRESSED:
                stream = cast(BinaryIO, lzma.LZMAFile(content))  # noqa: SIM115  # it holds nothing but `content`
            while line := stream.readline(LONGEST + 1):
                size += len(line)
                if size > LARGEST:
                    raise UserError(f"{file}: has more than {LARGEST >> 30} GB; give a file that pack wrote")
                yield line.decode()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give a file that pack wrote") from None
    except (ValueError, EOFError, lzma.LZMAError):
        raise UserError(f"{file}: is damaged or incomplete; restore it") from None
