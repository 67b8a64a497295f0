"""One update of a learner, in five steps, each in the file of its name: prepare, train, judge, record, publish.

Each step is a function of what the one before returned, and leaves that as it is. The learner that is updated stays as
it is, too: if a step fails, nothing has been learned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path

from pycil_wsc.classifier.store import learner_file
from pycil_wsc.classifier.store.bookkeeping import Entry
from pycil_wsc.classifier.store.hashes import hashes_of
from pycil_wsc.classifier.store.saved_learner import answers_of
from pycil_wsc.classifier.store.settings import configured
from pycil_wsc.classifier.update.judge import decision_of, judge, right
from pycil_wsc.classifier.update.prepare import Before, Prepared, prepare
from pycil_wsc.classifier.update.publish import (
    UpdateResult,
    begin_with,
    folder_of_updates,
    folders_of,
    publish,
    read_rejection,
    refuse_others,
    remove_unfinished,
)
from pycil_wsc.classifier.update.record import record
from pycil_wsc.classifier.update.train import train
from pycil_wsc.data.images.fingerprint import changed
from pycil_wsc.data.images.sources import ImageSource
from pycil_wsc.errors import UserError
from pycil_wsc.runs.run import losses
from pycil_wsc.seeding import lock_of_threads

ONE_AT_A_TIME = lock_of_threads()  # training draws from the random generators of the process


def updated(before: Before, source: ImageSource) -> UpdateResult:
    """Learn one more task, or load it if it was learned in ``out`` before."""
    started = time.perf_counter()
    prepared = prepare(before, source)
    with folder_of_updates(before.out) as folder:
        folders = folders_of(folder, len(prepared.config.tasks), _identity(prepared))
        if folders.rejection.is_file():  # first: ``saved`` may have the next update as this task
            return UpdateResult(None, None, read_rejection(folders.rejection))
        if learner_file.exists(folders.saved):
            remove_unfinished(folders.saved)
            return _restored(prepared, folders.saved)
        refuse_others(folders)
        if before.out is not None:
            begin_with(before.per_class, folders.work)
        trained = train(prepared, folders.work)
        judged = judge(trained)
        recorded = record(judged, started)
        return publish(recorded, folders)


def _identity(prepared: Prepared) -> str:
    """Identifies the update: settings, images, the learner before it, and the gate with its images."""
    before, tests = prepared.before, prepared.tests
    gate = before.accept.settings() if before.accept else None
    parts = [repr(prepared.config.identity()), prepared.stream.fingerprint, before.losses, gate, before.per_class]
    if tests is not None:
        pixels = hashlib.sha256(tests.images.tobytes()).hexdigest() if tests.in_memory else None
        parts.append([tests.targets.tolist(), pixels, hashes_of((tests,), {})])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _restored(prepared: Prepared, saved: Path) -> UpdateResult:
    """Load the learner that an earlier process saved in ``saved``, if it was trained on the same task.

    That process may have had another gate: the decision is made anew.
    """
    before, config = prepared.before, prepared.config
    learner, _ = learner_file.read(saved)
    same = configured(learner.config, tasks=config.tasks).identity() == config.identity()
    if not same or learner.bookkeeping.per_class != before.per_class:
        raise UserError(f"{saved}: was learned with other settings; choose another folder 'out'")
    if losses(learner.state["history"][:-1]) != before.losses:
        raise UserError(f"{saved}: was learned from another learner; choose another folder 'out'")
    difference = changed(learner.held.fingerprint, prepared.stream.fingerprint)
    if difference:
        raise UserError(f"{saved}: was learned from other images ({difference}); choose another folder 'out'")
    before.bar.say(f"task {len(config.tasks)} was learned before: loaded from {saved}")
    learner = learner._replace(config={"tasks": list(config.tasks)})
    answers = answers_of(config, learner)
    if before.accept is None:
        return UpdateResult(learner, answers, None)
    decision = decision_of(prepared, learner, answers, right(answers, prepared.bookkeeping.held_out))
    assert decision
    if not decision["accepted"]:
        return UpdateResult(None, None, decision)
    *others, entry = learner.bookkeeping.entries or (Entry(),)
    entries = (*others, {**entry, **decision})
    bookkeeping = dataclasses.replace(learner.bookkeeping, entries=entries)
    return UpdateResult(learner._replace(bookkeeping=bookkeeping), answers, decision)
