"""One update of a learner: the images prepared, a copy trained, and the copy kept or rejected."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import Timeout

from pycil_wsc.classifier import shelf
from pycil_wsc.classifier.answers import Answers, numbers_of
from pycil_wsc.classifier.bar import Bar
from pycil_wsc.classifier.calibration import fitted_temperature
from pycil_wsc.classifier.copies import (
    check_exemplars,
    digests_of,
    hashes_of,
    known_hashes_of,
    learns_once,
    takes_out,
    with_classes,
)
from pycil_wsc.classifier.corrections import (
    Corrections,
    corrections_in,
    counted,
    told,
    without_exemplars,
    without_former,
)
from pycil_wsc.classifier.gate import EXEMPLARS, Accept, Decision, decided
from pycil_wsc.classifier.inference import Classifier, Reached, precision_of_answers, rebuilt
from pycil_wsc.classifier.ledger import Entry, Ledger, Relabelled, set_aside
from pycil_wsc.classifier.model import Transform, for_prediction
from pycil_wsc.classifier.settings import configured, refusing, values_of
from pycil_wsc.classifier.shelf import SavedLearner
from pycil_wsc.classifier.streams import chunks
from pycil_wsc.config.options import Config
from pycil_wsc.data.configured import check_divided_memory, for_training, with_memory_size
from pycil_wsc.data.images.files import decode, line_of
from pycil_wsc.data.images.fingerprint import changed
from pycil_wsc.data.images.sources import Source, read_source
from pycil_wsc.data.memory.values import renumbered
from pycil_wsc.data.tasks.stream import extended, kept
from pycil_wsc.data.types import Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import absolute, locked, read_file, read_json, write_json
from pycil_wsc.methods.consolidation.consolidated import configured_learner
from pycil_wsc.reproducibility import threads
from pycil_wsc.runs.checkpoint import CHECKPOINT
from pycil_wsc.runs.class_incremental import as_configured
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.run import Run, end_of, losses
from pycil_wsc.seeding import lock_of_threads
from pycil_wsc.training.learner import capacity_of
from pycil_wsc.training.prediction import best_classes

ONE_AT_A_TIME = lock_of_threads()  # training draws from the random generators of the process
CLASSES_NAMED = 10  # at most, in a line
REJECTED = "rejected"  # the folder in ``out`` with a file for each rejected update
HELD_OUT = "held_out.json"  # beside the checkpoint: how many images of each class are held out


class Outcome(NamedTuple):
    """``state`` and ``answers`` of the updated learner, None if the update was rejected.

    ``decision``: that of the gate, None without one.
    """

    state: SavedLearner | None
    answers: Answers | None
    decision: Decision | None


class Update:
    """Updates a learner by one task, and leaves what it is given as it is.

    Args:
        config: the learner's configuration.
        present: its state, or None before the first task.
        answers: its answers, likewise.
        per_class: images of each class to hold out.
        out: folder of the work, or None.
        bar: shows the progress.
        accept: the condition on which the update is kept, or None.
    """

    def __init__(
        self,
        config: Config,
        present: SavedLearner | None,
        answers: Answers | None,
        per_class: int,
        out: Path | None,
        bar: Bar,
        accept: Accept | None,
    ) -> None:
        self.present = present
        self.answers = answers
        self.accept = accept
        self.base = config
        self.config = config  # with the task of this update, once that is known
        self.held = present.held if present else None
        self.hashes = dict(present.hashes) if present else {}  # SHA-256 of the image files that have been read
        self.ledger = dataclasses.replace(present.ledger if present else Ledger(), per_class=per_class)
        self.known = list(self.held.info.classes) if self.held else []
        self.relabelled: list[Relabelled] = []
        self.out = out
        self.bar = bar

    def learn(self, source: Source) -> Outcome:
        """Learn one more task, or load it if it was learned in ``out`` before."""
        started = time.perf_counter()
        if self.present:
            splits = self.present.held.train, self.ledger.held_out
            check_exemplars(splits, self.present.hashes)
        stream = self._prepared(source)
        tests = self._tests(stream)
        with self._folder() as folder:
            saved = folder / f"task{len(self.config.tasks)}"
            work = folder / f".{saved.name}"
            record = folder / REJECTED / f"{saved.name}-{self._identity(stream, tests)}.json"
            if record.is_file():  # rejected before; the folder may have the next update as this task
                return Outcome(None, None, read_rejection(record))
            if shelf.exists(saved):
                self._remove_unfinished(saved)
                return self._restored(saved, stream, tests)
            for path in (saved, work):
                if path.is_file():
                    raise UserError(f"{path}: is a file; move or remove it, or choose another out")
            if saved.exists() and any(saved.iterdir()):
                raise UserError(f"{saved}: has files, but no learner; move or remove it, or choose another out")
            self._refuse_other_held_out(work)
            trained = self._trained(work, stream)
            learned, answers, decision = self._judged(trained, tests, started)
            if decision and not decision["accepted"]:
                shutil.rmtree(work, ignore_errors=True)
                if self.out is not None:  # last: what is in ``work`` is then the next update's
                    write_json(record, decision)
                return Outcome(None, None, decision)
            if self.out is not None:
                shelf.write(work, learned)
            os.rename(work, saved)
            self._remove_unfinished(saved)
        return Outcome(learned, answers, decision)

    def _remove_unfinished(self, saved: Path) -> None:
        """Remove what only an unfinished task has: a process that is killed right after it has ended leaves it."""
        for name in (CHECKPOINT, HELD_OUT):
            (saved / name).unlink(missing_ok=True)

    # ---- preparing ---------------------------------------------------------------------------------------------------

    def _prepared(self, source: Source) -> Dataset:
        """The stream with the task of ``source``, without the images that are held out, which the ledger has then.

        Images that are kept from earlier tasks with the same class are left out. Those that were learned with another
        class get the new one (:mod:`pycil_wsc.classifier.corrections`). An image is held out if no task has trained on
        it, this one included, which may have it twice.
        """
        config = self.config
        part = as_configured(read_source(source, config.data_root), config)
        self._say_what_is_left_out(part)
        part = dataclasses.replace(part, train=_absolute(part.train), test=_rows(part.test, np.empty(0, np.int64)))
        part = dataclasses.replace(part, left_out={})  # it has been said
        self.hashes |= hashes_of((part.train,), self.hashes)
        digests = digests_of(part.train, self.hashes)
        part, digests, relearned = self._corrected(part, digests)
        relabelled = np.isin(digests, digests_of(self.ledger.held_out, self.hashes))  # held out with another class
        _, place, times = np.unique(digests, return_inverse=True, return_counts=True)
        unseen = (times[place] == 1) & ~np.isin(digests, self.ledger.learned) & ~relabelled
        unseen[relearned.rows] = False
        counts = self.ledger.counts(self.known)
        aside = set_aside(part, unseen, counts, self.ledger.per_class, config.seed, len(config.tasks))
        stream = extended(self.held, dataclasses.replace(part, train=_rows(part.train, ~aside)))
        stream = self._with_relearned(stream, relearned, aside)
        held_out = _rows(part.train, aside)
        check_usable(held_out, stream.info)
        labels = numbers_of(held_out.targets, part.info.classes, stream.info.classes)
        self.ledger = self.ledger.with_images(held_out.images, labels)
        learned = np.concatenate([digests, with_classes(digests, part.train.targets, part.info.classes)])
        learned = learned[np.tile(~aside, 2)]
        self.ledger = dataclasses.replace(self.ledger, learned=np.union1d(self.ledger.learned, learned))
        config = dataclasses.replace(config, tasks=(*config.tasks, part.info.name))
        self.config = with_memory_size(config, stream.train.images)
        self._check_memory(len(stream.info.classes))
        return stream

    def _say_what_is_left_out(self, part: Dataset) -> None:
        if line := line_of(part.left_out):
            self.bar.say(line)
        empty = np.setdiff1d(np.arange(len(part.info.classes)), part.train.targets)
        if len(empty):
            names = ", ".join(f"'{part.info.classes[label]}'" for label in empty[:CLASSES_NAMED])
            more = f" and {len(empty) - CLASSES_NAMED} others" if len(empty) > CLASSES_NAMED else ""
            self.bar.say(f"not learned, as there is no image: {names}{more}")

    def _corrected(self, part: Dataset, digests: np.ndarray) -> tuple[Dataset, np.ndarray, Corrections]:
        """``part`` and its ``digests`` without what is known already, and which images were learned with other classes.

        Exemplars with these former classes are dropped, and the ledger forgets the classes.
        """
        names, known, method = part.info.classes, self.known, self.config.model_name
        found = corrections_in(digests, part.train.targets, names, self.present)
        keeps_both = learns_once(method) and not takes_out(method)
        left = self._left(part, digests, found.rows[:0] if keeps_both else found.rows)
        found = found.of(left[found.rows])
        relearned = Corrections(np.searchsorted(np.flatnonzero(left), found.rows), found.former)
        rest = dataclasses.replace(part, train=_rows(part.train, left))
        if self.present is None or not len(found.rows):
            return rest, digests[left], relearned
        after = "they are trained on with the new class, which exemplars have from now on"
        if takes_out(method):
            after = "the new class replaces it"
        elif keeps_both:
            after = f"'{method}' cannot take that out again: start a new learner to be rid of it"
        self.bar.say(told(found, part.train, names, known, after))
        self.relabelled = counted(found, part.train.targets, names, known)
        gone = np.isin(digests_of(self.present.held.train, self.present.hashes), digests[found.rows])
        self.present = without_exemplars(self.present, gone)
        self.held = self.present.held
        if not keeps_both:
            learned = without_former(self.ledger.learned, digests[found.rows], known)
            self.ledger = dataclasses.replace(self.ledger, learned=learned)
        return rest, digests[left], relearned

    def _with_relearned(self, stream: Dataset, relearned: Corrections, aside: np.ndarray) -> Dataset:
        """``stream`` with the former classes of the images of its last task; those set ``aside`` are not in it."""
        assert stream.arrivals is not None
        first = len(stream.train) - int((~aside).sum())
        samples = first + np.cumsum(~aside)[relearned.rows] - 1
        pairs = np.stack([samples, relearned.former], axis=1)
        return dataclasses.replace(stream, arrivals=dataclasses.replace(stream.arrivals, relearned=pairs))

    def _left(self, part: Dataset, digests: np.ndarray, relearned: np.ndarray) -> np.ndarray:
        """The images of ``part`` that the learner does not keep with the same class: bool (N,).

        A folder that has grown since the last task brings its old images again: those that are exemplars would be
        trained on twice, and held-out ones once. A method that learns each image once is spared all that it has
        learned, and copies of an image in one class. The rows ``relearned``, which were learned with another class,
        are not left out. Raises a :class:`UserError` if nothing is left.
        """
        once = learns_once(self.config.model_name)
        mixed = with_classes(digests, part.train.targets, part.info.classes)
        left = np.ones(len(digests), bool)
        if once:
            left[:] = False
            left[np.unique(mixed, return_index=True)[1]] = True
            if number := int((~left).sum()):
                self.bar.say(f"{number} of {len(digests)} images are copies of others of their class and are left out")
        if self.present is None:
            return left
        kept_already = np.zeros(len(digests), bool)
        for split in (self.present.held.train, self.ledger.held_out):
            theirs = digests_of(split, self.present.hashes)
            kept_already |= np.isin(mixed, with_classes(theirs, split.targets, self.known))
        verb, participle = "keeps", "kept"
        if once:
            kept_already |= np.isin(mixed, self.ledger.learned)
            verb, participle = "has", "known"
        kept_already[relearned] = False
        if len(digests) and kept_already.all():
            raise UserError(
                f"{part.info.name}: the learner {verb} all of its images already; there is nothing to learn"
            )
        if number := int(kept_already.sum()):
            self.bar.say(f"{number} of {len(digests)} images are {participle} from earlier tasks and are left out")
        return left & ~kept_already

    def _check_memory(self, classes: int) -> None:
        """Raise a :class:`UserError` if the memory would lose all of its exemplars, as it cannot hold one per class."""
        method = configured_learner(self.config)
        own = method.measures_quotas  # checked when the task is planned
        if self.held is not None and len(self.held.train) and not own:
            remedy = "save the learner, and load it with a larger {key}"
            size = capacity_of(self.config, method.stored_bytes, classes)
            check_divided_memory(self.config, classes, f"{classes} classes", remedy, size)

    def _tests(self, stream: Dataset) -> Split | None:
        """The user's images for the gate, with classes by number; None without any.

        Raises :class:`UserError` if the gate has no image of a known class.
        """
        if self.accept is None:
            return None
        if isinstance(self.accept.on, str) and self.accept.on == EXEMPLARS:
            if self.held and not len(self.held.train) and not len(self._held_out_of_known):
                raise UserError(
                    f"accept: there is no image of a known class to compare on: '{self.config.model_name}' keeps no "
                    "exemplars, and no image is held out; give Accept(on=...) some, or begin with held_out=20"
                )
            return None
        data = read_source(self.accept.on, self.config.data_root)
        if line := line_of(data.left_out):
            self.bar.say(f"accept: {line}")
        split = data.test if len(data.test) else data.train
        labels = numbers_of(split.targets, data.info.classes, stream.info.classes)
        known = labels >= 0
        if self.known and not (known & (labels < len(self.known))).any():
            raise UserError(f"accept: {data.info.name} has no image of a class that was learned before; add some")
        tests = Split(split.images[known], labels[known])
        check_usable(tests, stream.info)
        return tests

    @property
    def _held_out_of_known(self) -> np.ndarray:
        """The labels of held-out images of classes that were known before this task."""
        targets = self.ledger.held_out.targets
        return targets[targets < len(self.known)]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """``out``, locked for other processes, or a temporary folder if ``out`` is None."""
        if self.out is None:
            try:
                folder = tempfile.TemporaryDirectory(prefix="pycil_wsc-")
            except OSError as error:
                problem = f"no temporary folder can be made ({error.strerror})"
                raise UserError(f"learn: {problem}; set TMPDIR to a folder that can be written, or give out") from None
            with folder as name:
                yield Path(name)
            return
        try:
            lock = locked(self.out, wait=False)
        except Timeout:
            raise UserError(f"{self.out}: is in use by another process; wait, or choose another folder") from None
        with lock:
            yield self.out

    def _identity(self, stream: Dataset, tests: Split | None) -> str:
        """Identifies the update: settings, images, the learner before it, and the gate with its images."""
        before = losses(self.present.state["history"]) if self.present else []
        gate = self.accept.settings() if self.accept else None
        parts = [repr(self.config.identity()), stream.fingerprint, before, gate, self.ledger.per_class]
        if tests is not None:
            pixels = hashlib.sha256(tests.images.tobytes()).hexdigest() if tests.in_memory else None
            parts.append([tests.targets.tolist(), pixels, hashes_of((tests,), {})])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _refuse_other_held_out(self, work: Path) -> None:
        """Raise :class:`UserError` if a training that was interrupted in ``work`` had other images held out."""
        if self.out is None:
            return
        note, ours = work / HELD_OUT, self.ledger.per_class
        before = read_json(note) if note.is_file() else ours
        if before != ours and (work / CHECKPOINT).is_file():
            raise UserError(
                f"{work}: was begun with held_out={before}, not {ours}; continue with that, or choose another folder "
                "'out'"
            )
        work.mkdir(parents=True, exist_ok=True)
        write_json(note, ours)

    # ---- training ----------------------------------------------------------------------------------------------------

    def _trained(self, folder: Path, stream: Dataset) -> SavedLearner:
        """Train on the last task of ``stream``, with checkpoints in ``folder`` if the learner has one of its own."""
        config = self.config
        state = self.present.state if self.present else None
        config = dataclasses.replace(config, cache_first_task=False)
        if state and not configured_learner(config).starts_anew:
            config = dataclasses.replace(config, pretrained=False)  # the state already has the weights
        check_backbone(config, stream.info.image_size)
        data = for_training(stream, config)
        run = Run(config, data, self.bar, folder, state, checkpoints=self.out is not None)
        self.bar.begin(run.plan)
        with self.bar, threads(config.threads):
            run.learn()
        held, numbers = kept(stream, run.learner.memory.indices)
        state = run.state(end_of(run.manager.tasks[-1]))
        extra = state["learner"]["_extra_state"]
        classes = run.learner.memory.classes
        extra["memory"]["classes"] = {c: numbers[indices].tolist() for c, indices in classes.items()}
        extra["stored"] = renumbered(extra["stored"], numbers)
        hashes = known_hashes_of((held.train, self.ledger.held_out), self.hashes)
        return SavedLearner(values_of(self.base, self.config.tasks), held, state, hashes)

    def _restored(self, saved: Path, stream: Dataset, tests: Split | None) -> Outcome:
        """Load the learner that an earlier process saved in ``saved``, if it was trained on ``stream``.

        That process may have had another gate: the decision is made anew.
        """
        found, _ = shelf.read(saved)
        config = self.config
        before = losses(self.present.state["history"]) if self.present else []
        same = configured(found.config, tasks=config.tasks).identity() == config.identity()
        if not same or found.ledger.per_class != self.ledger.per_class:
            raise UserError(f"{saved}: was learned with other settings; choose another folder 'out'")
        if losses(found.state["history"][:-1]) != before:
            raise UserError(f"{saved}: was learned from another learner; choose another folder 'out'")
        if difference := changed(found.held.fingerprint, stream.fingerprint):
            raise UserError(f"{saved}: was learned from other images ({difference}); choose another folder 'out'")
        self.bar.say(f"task {len(config.tasks)} was learned before: loaded from {saved}")
        learned = found._replace(config={"tasks": list(config.tasks)})
        answers = answers_of(config, learned)
        if not self.accept:
            return Outcome(learned, answers, None)
        decision = self._decided(self.accept, answers, learned, tests, right(answers, self.ledger.held_out))
        if not decision["accepted"]:
            return Outcome(None, None, decision)
        *others, entry = learned.ledger.entries or (Entry(),)
        ledger = dataclasses.replace(learned.ledger, entries=(*others, {**entry, **decision}))
        return Outcome(learned._replace(ledger=ledger), answers, decision)

    # ---- judging -----------------------------------------------------------------------------------------------------

    def _judged(
        self, learned: SavedLearner, tests: Split | None, started: float
    ) -> tuple[SavedLearner, Answers, Decision | None]:
        """Compare the learner with the present one, calibrate it, and note the task.

        A held-out image that came again with another class has been trained on. It is still used here, with its former
        class, and then no longer held out.
        """
        answers = answers_of(self.config, learned)
        held_out = self.ledger.held_out
        logits = answers.logits(held_out.images).cpu()
        correct = best_classes(logits)[:, 0].numpy() == held_out.targets
        decision = self._decided(self.accept, answers, learned, tests, correct) if self.accept else None
        unseen = ~np.isin(digests_of(held_out, self.hashes), self.ledger.learned)
        held_out = _rows(held_out, unseen)
        self.ledger = dataclasses.replace(self.ledger, held_out=held_out)
        if len(held_out):
            temperature = fitted_temperature(logits.numpy()[unseen], held_out.targets)
            answers = Answers(answers.classifier, answers.classes, temperature)
        entry = self._noted(learned, answers, correct[unseen])
        entry["seconds"] = time.perf_counter() - started
        if decision:
            entry = {**entry, **decision}
        ledger = dataclasses.replace(self.ledger, temperature=answers.temperature, entries=(*self._entries(), entry))
        return learned._replace(ledger=ledger), answers, decision

    def _decided(
        self, accept: Accept, answers: Answers, learned: SavedLearner, tests: Split | None, correct: np.ndarray
    ) -> Decision:
        """The gate's decision between the present answers and the new ones, ``correct`` about the held-out images."""
        count = len(self.known)
        if tests is not None:
            on, old, new = "images of your own", tests, tests
        elif len(self._held_out_of_known) or not count and len(self.ledger.held_out):
            on, old, new = "held-out images", self.ledger.held_out, self.ledger.held_out
        else:  # old exemplars: both models were trained on them
            on, new = "exemplars, which were trained on", learned.held.train
            old = self.held.train if self.held else new
        is_old, is_new = old.targets < count, new.targets >= count
        if new is self.ledger.held_out:
            after = correct[is_old], correct[is_new]
        else:
            after = right(answers, _rows(old, is_old)), right(answers, _rows(new, is_new))
        before = right(self.answers, _rows(old, is_old)) if self.answers else np.empty(0, bool)
        return decided(accept, (before, after[0]), after[1], len(answers.classes), on)

    def _noted(self, learned: SavedLearner, answers: Answers, correct: np.ndarray) -> Entry:
        """What the history tells of the task; ``correct``: whether each held-out image is classified correctly."""
        fingerprint = learned.held.fingerprint or {}
        own = fingerprint["tasks"][-1]
        entry: Entry = {
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "data": {"name": learned.config["tasks"][-1], "images": own["train"], "sha256": own["sha256"]},
            "classes": answers.classes[len(self.known) :],
        }
        if self.relabelled:
            entry["relabelled"] = self.relabelled
        if len(self.ledger.held_out):
            old = self.ledger.held_out.targets < len(self.known)
            parts = {"known": correct[old], "new": correct[~old], "all": correct}
            entry["accuracies"] = {name: 100 * float(part.mean()) for name, part in parts.items() if len(part)}
        return entry

    def _entries(self) -> list[Entry]:
        """The notes about the tasks so far; a task that an earlier version learned has an empty one."""
        tasks = len(self.config.tasks) - 1
        entries = list(self.ledger.entries)
        return [Entry()] * (tasks - len(entries)) + entries


def _absolute(split: Split) -> Split:
    """Image files by their absolute paths, which hold in whichever folder the process will be."""
    if split.in_memory:
        return split
    return Split(np.array([os.path.normpath(absolute(path)) for path in split.images.tolist()], str), split.targets)


def _rows(split: Split, rows: np.ndarray) -> Split:
    """The images of these ``rows``."""
    return Split(split.images[rows], split.targets[rows])


def check_usable(split: Split, info: DatasetInfo) -> None:
    """Raise a :class:`UserError` for images that cannot be classified: now, rather than after the training."""
    if split.in_memory:
        list(chunks(split.images[:1], Transform(info), 1))  # all have one size
        return
    for path in split.images.tolist():
        decode(path)


def read_rejection(record: Path) -> Decision:
    """The gate's decision in the ``record`` of a rejected update. Raises a :class:`UserError` if it is damaged."""
    with refusing(record, "the record of a rejected update", "remove it to try the update again"):
        decision = json.loads(read_file(record))
        if decision["accepted"] is not False:
            raise ValueError("it has other contents")
        return Decision(accepted=False, reason=decision["reason"], gate=decision["gate"])


def answers_of(config: Config, learned: SavedLearner) -> Answers:
    """What a learner with this configuration and state answers. Raises an exception if they do not fit together."""
    assert learned.held.arrivals is not None
    info, seen = learned.held.info, learned.held.arrivals.seen
    reached = Reached.of_stream(seen)
    config = dataclasses.replace(config, tasks=tuple(learned.config["tasks"]), pretrained=False)
    learner = for_prediction(rebuilt(config, info, reached, learned.state["learner"]))
    classifier = Classifier(learner, info, reached.classes, config.num_workers, precision_of_answers(learner))
    return Answers(classifier, info.classes, learned.ledger.temperature)


def right(answers: Answers, split: Split) -> np.ndarray:
    """Whether each image is classified correctly: bool (N,)."""
    return answers.classifier.predict(split.images) == split.targets
