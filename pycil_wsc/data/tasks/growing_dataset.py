"""Streams: tasks with their own images, joined into one growing data set.

Classes are identified by name and may recur in later tasks.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pycil_wsc.data.images.fingerprint import fingerprint
from pycil_wsc.data.images.paths import concatenated
from pycil_wsc.data.types import Arrivals, Dataset, Fingerprint, Split
from pycil_wsc.errors import UserError


def extended(stream: Dataset | None, part: Dataset) -> Dataset:
    """Append ``part`` to ``stream`` as its next task, or start a stream with it if ``stream`` is None.

    Classes of ``part`` with known names are those of the stream; new classes are added in ``part``'s order. Samples of
    the stream keep their indices, and those of ``part`` follow. Size, normalisation and augmentation are those of the
    first task. Raises a :class:`UserError` if the images of ``part`` differ from the stream's in form or size.
    """
    names, before = (stream.info.classes, stream.arrivals) if stream else ((), None)
    learned = {part.info.classes[label] for label in np.unique(part.train.targets)}
    classes = (*names, *(name for name in part.info.classes if name in learned and name not in names))
    _check(stream, part, classes)
    number = {name: label for label, name in enumerate(classes)}
    labels = np.array([number.get(name, -1) for name in part.info.classes])
    seen = before.seen if before else ()
    splits, tasks = [], []
    for which in ("train", "test"):
        old, new = getattr(stream, which, None), getattr(part, which)
        new = Split(new.images, labels[new.targets])
        splits.append(_concatenated(old, new))
        arrived = np.full(len(new), len(seen), np.int64)
        tasks.append(np.concatenate([getattr(before, which), arrived]) if before else arrived)
    info = replace(stream.info if stream else part.info, classes=classes)
    arrivals = Arrivals((*seen, len(classes)), train=tasks[0], test=tasks[1])
    left_out = Counter(stream.left_out if stream else {}) + Counter(part.left_out)
    return Dataset(info, splits[0], splits[1], part.validation_share, _fingerprint(stream, part), arrivals, left_out)


def joined(parts: Sequence[Dataset]) -> Dataset:
    """The stream with the tasks ``parts`` (at least one); raises a :class:`UserError` if one has no test images."""
    for part in parts:
        if not len(part.test):
            raise UserError(
                f"{part.info.name}: no test images; arrange the images as PATH/{{train,val}}/<class>/*.jpg, or set "
                "validation_split"
            )
    stream = extended(None, parts[0])
    for part in parts[1:]:
        stream = extended(stream, part)
    return stream


def kept(stream: Dataset, indices: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """Reduce ``stream`` to the training samples ``indices``, in index order, without test samples.

    This is what a learner keeps between two tasks. Also returns the new index of each previous training sample, or -1
    if it was dropped: int64 (N,).
    """
    assert stream.arrivals is not None
    rows = np.unique(indices)
    numbers = np.full(len(stream.train), -1, np.int64)
    numbers[rows] = np.arange(len(rows))
    train = Split(stream.train.images[rows], stream.train.targets[rows])
    test = Split(stream.test.images[:0], stream.test.targets[:0])
    arrivals = Arrivals(stream.arrivals.seen, stream.arrivals.train[rows], stream.arrivals.test[:0])
    return replace(stream, train=train, test=test, arrivals=arrivals), numbers


def _check(stream, part, classes):
    unknown = {part.info.classes[label] for label in np.unique(part.test.targets)} - set(classes)
    if unknown:
        raise UserError(
            f"{part.info.name}: class '{min(unknown)}' has test images, but no training images in this task or an "
            "earlier one; add some, or remove its test images"
        )
    if stream is None:
        return
    if stream.train.in_memory != part.train.in_memory:
        old = "arrays" if stream.train.in_memory else "image files"
        new = "arrays" if part.train.in_memory else "image files"
        raise UserError(f"{part.info.name}: has {new}, earlier tasks had {old}; give all tasks in the same form")
    if part.train.in_memory and part.train.images.shape[1:] != stream.train.images.shape[1:]:
        old = stream.train.images.shape[1]
        new = part.train.images.shape[1]
        raise UserError(f"{part.info.name}: images of side {new}, earlier tasks had {old}; resize them to one size")


def _concatenated(old, new):
    """Concatenate two splits; ``old`` may be None."""
    if old is None:
        return new
    return Split(concatenated([old.images, new.images]), np.concatenate([old.targets, new.targets]))


def _fingerprint(stream: Dataset | None, part: Dataset) -> Fingerprint:
    """The fingerprint (:func:`pycil_wsc.data.images.fingerprint.fingerprint`) of all tasks so far.

    The entry ``tasks`` has that of each task, whose hash also covers its class names.
    """
    newest = part.fingerprint or fingerprint(part.train, part.test)
    tasks = [*(stream.fingerprint or {})["tasks"], newest] if stream else [newest]
    return _with_last(tasks, part.info.classes)


def marked(stream: Dataset, change: Sequence[str]) -> Dataset:
    """``stream`` with a fingerprint that also covers a ``change`` of its classes, described by strings."""
    return replace(stream, fingerprint=_with_last((stream.fingerprint or {})["tasks"], change))


def _with_last(tasks: Sequence[Fingerprint], also: Sequence[str]) -> Fingerprint:
    """The fingerprint of ``tasks``, of which the last one's hash ``also`` covers some strings."""
    *others, last = tasks
    covered = hashlib.sha256("\0".join([last["sha256"], *also]).encode(errors="surrogatepass"))
    tasks = [*others, last | {"sha256": covered.hexdigest()[:16]}]
    total = hashlib.sha256("".join(task["sha256"] for task in tasks).encode()).hexdigest()[:16]
    return {name: sum(task[name] for task in tasks) for name in ("train", "test")} | {"sha256": total, "tasks": tasks}
