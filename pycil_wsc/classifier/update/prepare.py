"""The first step of an update: the images are read, and it is known what is to be learned of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycil_wsc.classifier.class_names import told_similar
from pycil_wsc.classifier.predict.answers import Answers, numbers_of
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping, Relabelled
from pycil_wsc.classifier.store.exemplar_files import check_exemplars
from pycil_wsc.classifier.store.hashes import Hashes, digests_of, with_classes
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.update.corrections import Corrections
from pycil_wsc.classifier.update.gate import EXEMPLARS, Accept
from pycil_wsc.classifier.update.held_out import check_usable, rows_of, set_aside, unseen_in
from pycil_wsc.classifier.update.known_images import Say, new_images
from pycil_wsc.classifier.update.progress_bar import ProgressBar
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.configured import check_divided_memory, with_memory_size
from pycil_wsc.data.images.image_files import line_of
from pycil_wsc.data.images.paths import renamed
from pycil_wsc.data.images.sources import ImageSource, read_source
from pycil_wsc.data.tasks.growing_dataset import extended
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import absolute
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.runs.class_incremental import as_configured
from pycil_wsc.runs.run import losses
from pycil_wsc.training.learner import capacity_of

CLASSES_NAMED = 10  # at most, in a line


@dataclass(frozen=True, eq=False)
class Before:
    """What an update begins with.

    Args:
        config: the learner's configuration.
        learner: its state, or None before the first task.
        answers: its answers, likewise.
        per_class: images of each class to hold out.
        out: folder of the work, or None.
        bar: shows the progress.
        accept: the condition on which the update is kept, or None.
    """

    config: Config
    learner: SavedLearner | None
    answers: Answers | None
    per_class: int
    out: Path | None
    bar: ProgressBar
    accept: Accept | None

    @property
    def known(self) -> int:
        """The number of classes."""
        return len(self.learner.held.info.classes) if self.learner else 0

    @property
    def losses(self) -> list[list[float]]:
        """Those of the tasks so far, which tell learners apart."""
        return losses(self.learner.state["history"]) if self.learner else []


class Prepared(NamedTuple):
    """A task that can be learned.

    ``config``: with the task. ``stream``: the exemplars and the task's images, but for those held out. ``learner``: as
    before, without the exemplars that have another class now. ``bookkeeping``: with the task's images. ``hashes``: the
    SHA-256 of the image files that have been read. ``tests``: the user's images for the gate, if any.
    """

    before: Before
    config: Config
    stream: Dataset
    learner: SavedLearner | None
    bookkeeping: Bookkeeping
    hashes: Mapping[str, str]
    relabelled: list[Relabelled]
    tests: Split | None


def prepare(before: Before, source: ImageSource) -> Prepared:
    """Read the images, leave out those that are known already, and hold some out.

    Images that are kept from earlier tasks with the same class are left out. Those that were learned with another
    class get the new one (:mod:`pycil_wsc.classifier.update.corrections`).
    """
    config, learner, say = before.config, before.learner, before.bar.say
    bookkeeping = dataclasses.replace(learner.bookkeeping if learner else Bookkeeping(), per_class=before.per_class)
    known = learner.hashes if learner else {}
    check_exemplars((learner.held.train, bookkeeping.held_out) if learner else (), known)
    part = part_of(source, config, say)
    if line := told_similar(part.info.classes, learner.held.info.classes if learner else ()):
        say(line)
    hashes = Hashes(part.train, known)
    digests = digests_of(part.train, hashes) if part.train.in_memory else hashes.digests
    part, digests, corrections, learner, bookkeeping, relabelled = new_images(
        part, digests, learner, bookkeeping, config.model_name, say
    )
    held = learner.held if learner else None

    unseen = unseen_in(digests, corrections.rows, bookkeeping, hashes)
    counts = bookkeeping.counts(held.info.classes if held else ())
    aside = set_aside(part, unseen, counts, before.per_class, config.seed, len(config.tasks))
    stream = extended(held, dataclasses.replace(part, train=rows_of(part.train, ~aside)))
    stream = _with_former_classes(stream, corrections, aside)
    bookkeeping = _noting(bookkeeping, part, stream, digests, aside)

    config = dataclasses.replace(config, tasks=(*config.tasks, part.info.name))
    config = with_memory_size(config, stream.train.images)
    _check_memory(config, held, len(stream.info.classes))
    tests = images_of_user(before.accept, held, bookkeeping.held_out, stream, config, say) if before.accept else None
    return Prepared(before, config, stream, learner, bookkeeping, hashes, relabelled, tests)


def _with_former_classes(stream: Dataset, corrections: Corrections, aside: np.ndarray) -> Dataset:
    """``stream`` with the former classes of the images of its last task; those set ``aside`` are not in it."""
    assert stream.arrivals is not None
    first = len(stream.train) - int((~aside).sum())
    samples = first + np.cumsum(~aside)[corrections.rows] - 1
    pairs = np.stack([samples, corrections.former], axis=1)
    return dataclasses.replace(stream, arrivals=dataclasses.replace(stream.arrivals, relearned=pairs))


def _noting(
    bookkeeping: Bookkeeping, part: Dataset, stream: Dataset, digests: np.ndarray, aside: np.ndarray
) -> Bookkeeping:
    """``bookkeeping`` with the images of a task: those set ``aside`` are held out, and the others learned."""
    held_out = rows_of(part.train, aside)
    check_usable(held_out, stream.info)
    labels = numbers_of(held_out.targets, part.info.classes, stream.info.classes)
    bookkeeping = bookkeeping.with_images(held_out.images, labels)
    learned = np.concatenate([digests, with_classes(digests, part.train.targets, part.info.classes)])
    learned = learned[np.tile(~aside, 2)]
    return dataclasses.replace(
        bookkeeping,
        learned=np.union1d(bookkeeping.learned, learned),
        images=np.union1d(bookkeeping.images, digests[~aside]),
    )


def _check_memory(config: Config, held: Dataset | None, classes: int) -> None:
    """Raise a :class:`UserError` if the memory would lose all of its exemplars, as it cannot hold one per class."""
    method = configured_learner(config).Plan(config)
    if held is None or not len(held.train) or method.measures_quotas:  # the last: checked when the task is planned
        return
    remedy = "save the learner, and load it with a larger {key}"
    size = capacity_of(config, method, classes)
    check_divided_memory(config, classes, f"{classes} classes", remedy, size)


def part_of(source: ImageSource, config: Config, say: Say) -> Dataset:
    """The training images of ``source``; ``say`` gets a line about what is not learned."""
    part = as_configured(read_source(source, config.data_root), config)
    line = line_of(part.left_out)
    if line:
        say(line)
    empty = np.setdiff1d(np.arange(len(part.info.classes)), part.train.targets)
    if len(empty):
        names = ", ".join(f"'{part.info.classes[label]}'" for label in empty[:CLASSES_NAMED])
        more = f" and {len(empty) - CLASSES_NAMED} others" if len(empty) > CLASSES_NAMED else ""
        say(f"not learned, as there is no image: {names}{more}")
    no_test = Split(part.test.images[:0], part.test.targets[:0])
    return dataclasses.replace(part, train=_absolute(part.train), test=no_test, left_out={})  # the last has been said


def _absolute(split: Split) -> Split:
    """Image files by their absolute paths, which hold in whichever folder the process will be."""
    if split.in_memory:
        return split
    return Split(renamed(split.images, lambda path: os.path.normpath(absolute(path))), split.targets)


def images_of_user(
    accept: Accept, before: Dataset | None, held_out: Split, stream: Dataset, config: Config, say: Say
) -> Split | None:
    """The user's images for the gate, with classes by number; None without any.

    Args:
        accept: the condition, which names the images.
        before: the exemplars of the learner before the update, None before the first task.
        held_out: the images that are held out.
        stream: the task that is learned, with all classes.
        config: of the learner.
        say: shows a line about files that are left out.

    Raises:
        UserError: if the gate has no image of a known class.
    """
    known = 0 if before is None else len(before.info.classes)
    if isinstance(accept.on, str) and accept.on == EXEMPLARS:
        if before is not None and not len(before.train) and not (held_out.targets < known).any():
            raise UserError(
                f"accept: there is no image of a known class to compare on: '{config.model_name}' keeps no "
                "exemplars, and no image is held out; give Accept(on=...) some, or begin with held_out=20"
            )
        return None
    data = read_source(accept.on, config.data_root)
    line = line_of(data.left_out)
    if line:
        say(f"accept: {line}")
    split = data.test if len(data.test) else data.train
    labels = numbers_of(split.targets, data.info.classes, stream.info.classes)
    has_class = labels >= 0
    if known and not (has_class & (labels < known)).any():
        raise UserError(f"accept: {data.info.name} has no image of a class that was learned before; add some")
    images = Split(split.images[has_class], labels[has_class])
    check_usable(images, stream.info)
    return images
