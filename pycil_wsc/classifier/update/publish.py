"""The last step of an update, and where updates are made and kept: the folder ``out`` of a learner, or a temporary one.

=========================  =======================================================================================
``task<number>``           a learned task: a saved learner, and the log of its training
``.task<number>``          the task that is being learned: checkpoints, and ``held_out.json``
``rejected/<name>.json``   the gate's decision about a rejected update, by what identifies the update
``.lock``                  held while a task is learned
=========================  =======================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout

from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.classifier.predict.arguments import refusing
from pycil_wsc.classifier.store import learner_file
from pycil_wsc.classifier.store.bookkeeping import Decision
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.update.record import Recorded
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked, read_file, read_json, write_json
from pycil_wsc.runs.checkpoint import CHECKPOINT

REJECTED = "rejected"
HELD_OUT = "held_out.json"  # beside the checkpoint: how many images of each class are held out


class UpdateResult(NamedTuple):
    """``state`` and ``answers`` of the updated learner, None if the update was rejected.

    ``decision``: that of the gate, None without one.
    """

    state: SavedLearner | None
    answers: Answers | None
    decision: Decision | None


def publish(recorded: Recorded, folders: Folders) -> UpdateResult:
    """Put the updated learner, or the rejection, where the next start of the script finds it."""
    judged = recorded.judged
    has_folder = judged.trained.prepared.before.out is not None
    if judged.is_rejected:
        shutil.rmtree(folders.work, ignore_errors=True)
        if has_folder:  # last: what is in ``work`` is then the next update's
            write_json(folders.rejection, judged.decision)
        return UpdateResult(None, None, judged.decision)
    if has_folder:
        learner_file.write(folders.work, recorded.learner)
        os.rename(folders.work, folders.saved)
        remove_unfinished(folders.saved)
    return UpdateResult(recorded.learner, recorded.answers, judged.decision)


class Folders(NamedTuple):
    """The places of one update: ``saved``, ``work`` and the file ``rejection``, as in the table above."""

    saved: Path
    work: Path
    rejection: Path


def folders_of(folder: Path, task: int, identity: str) -> Folders:
    """The places in ``folder`` of the update that learns the ``task``, counted from 1."""
    name = f"task{task}"
    return Folders(folder / name, folder / f".{name}", folder / REJECTED / f"{name}-{identity}.json")


@contextlib.contextmanager
def folder_of_updates(out: Path | None) -> Iterator[Path]:
    """``out``, locked for other processes, or a temporary folder if ``out`` is None."""
    if out is None:
        try:
            folder = tempfile.TemporaryDirectory(prefix="pycil_wsc-")
        except OSError as error:
            problem = f"no temporary folder can be made ({error.strerror})"
            raise UserError(f"learn: {problem}; set TMPDIR to a folder that can be written, or give out") from None
        with folder as name:
            yield Path(name)
        return
    try:
        lock = locked(out, wait=False)
    except Timeout:
        raise UserError(f"{out}: is in use by another process; wait, or choose another folder") from None
    with lock:
        yield out


def refuse_others(folders: Folders) -> None:
    """Raise :class:`UserError` if something that is no learner is where the update is to be."""
    saved = folders.saved
    for path in (saved, folders.work):
        if path.is_file():
            raise UserError(f"{path}: is a file; move or remove it, or choose another out")
    if saved.exists() and any(saved.iterdir()):
        raise UserError(f"{saved}: has files, but no learner; move or remove it, or choose another out")


def begin_with(held_out: int, work: Path) -> None:
    """Note that ``held_out`` images of each class are held out in the training in ``work``.

    Raises :class:`UserError` if it was interrupted there and had others held out.
    """
    note = work / HELD_OUT
    before = read_json(note) if note.is_file() else held_out
    if before != held_out and (work / CHECKPOINT).is_file():
        raise UserError(
            f"{work}: was begun with held_out={before}, not {held_out}; continue with that, or choose another folder "
            "'out'"
        )
    work.mkdir(parents=True, exist_ok=True)
    write_json(note, held_out)


def remove_unfinished(saved: Path) -> None:
    """Remove what only an unfinished task has: a process that is killed right after it has ended leaves it."""
    for name in (CHECKPOINT, HELD_OUT):
        (saved / name).unlink(missing_ok=True)


def read_rejection(record: Path) -> Decision:
    """The gate's decision in the ``record`` of a rejected update. Raises a :class:`UserError` if it is damaged."""
    with refusing(record, "the record of a rejected update", "remove it to try the update again"):
        decision = json.loads(read_file(record))
        if decision["accepted"] is not False:
            raise ValueError("it has other contents")
        return Decision(accepted=False, reason=decision["reason"], gate=decision["gate"])
