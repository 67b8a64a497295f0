"""Images of a new task that a learner knows already: left out with the same class, learned anew with another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pycil_wsc import registry
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping, Relabelled
from pycil_wsc.classifier.store.hashes import digests_of, with_classes
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.update.corrections import (
    Corrections,
    called,
    corrections_in,
    counted,
    told,
    without_exemplars,
    without_former,
)
from pycil_wsc.classifier.update.held_out import rows_of
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.closed_form.closed_form import ClosedForm

Say = Callable[[str], None]  # shows a line to the user


class NewImages(NamedTuple):
    """What of a task is to be learned, and the learner and its bookkeeping without what it corrects.

    ``digests``: of the images of ``part``. ``corrections``: those that were learned with another class.
    """

    part: Dataset
    digests: np.ndarray
    corrections: Corrections
    learner: SavedLearner | None
    bookkeeping: Bookkeeping
    relabelled: list[Relabelled]


def new_images(
    part: Dataset, digests: np.ndarray, learner: SavedLearner | None, bookkeeping: Bookkeeping, method: str, say: Say
) -> NewImages:
    """Leave out the images that ``learner`` knows with the same class.

    Of those that it learned with another class, exemplars are dropped, and the bookkeeping forgets the classes.
    """
    names = part.info.classes
    _say_contradictions(part, digests, say)
    keeps_both = learns_once(method) and not takes_out(method)
    corrections = corrections_in(digests, part.train.targets, names, learner)
    to_relearn = corrections.rows[:0] if keeps_both else corrections.rows
    is_new = _is_new(part, digests, to_relearn, learner, bookkeeping, method, say)
    corrections = corrections.of(is_new[corrections.rows])
    places = np.searchsorted(np.flatnonzero(is_new), corrections.rows)  # in what is left of the task
    relearned = Corrections(places, corrections.former)
    rest = replace(part, train=rows_of(part.train, is_new))
    if learner is None or not len(corrections.rows):
        return NewImages(rest, digests[is_new], relearned, learner, bookkeeping, [])
    known = learner.held.info.classes
    after = "they are trained on with the new class, which exemplars have from now on"
    if takes_out(method):
        after = "the new class replaces it"
    elif keeps_both:
        after = f"'{method}' cannot take that out again: start a new learner to be rid of it"
    say(told(corrections, part.train, names, known, after))
    relabelled = counted(corrections, part.train.targets, names, known)
    corrected = digests[corrections.rows]
    gone = np.isin(digests_of(learner.held.train, learner.hashes), corrected)
    if not keeps_both:
        learned = without_former(bookkeeping.learned, corrected, known)
        bookkeeping = replace(bookkeeping, learned=learned)
    return NewImages(rest, digests[is_new], relearned, without_exemplars(learner, gone), bookkeeping, relabelled)


def first_alike(contents: np.ndarray) -> np.ndarray:
    """The first row of the same content as each row: (n,) -> (n,)."""
    _, first, place = np.unique(contents, return_index=True, return_inverse=True)
    return first[place]


def contradictions(contents: np.ndarray, targets: np.ndarray) -> list[tuple[int, int]]:
    """(row, first row of the same content) of rows whose class is not that of the first: (n,), (n,)."""
    earlier = first_alike(contents)
    rows = np.flatnonzero(targets != targets[earlier])
    return list(zip(rows.tolist(), earlier[rows].tolist(), strict=True))


def _say_contradictions(part: Dataset, digests: np.ndarray, say: Say) -> None:
    targets, names = part.train.targets, part.info.classes
    contradicting_rows = contradictions(digests, targets)
    if not contradicting_rows:
        return
    row, first = contradicting_rows[0]
    image = called(part.train, row)
    classes = f"'{names[targets[first]]}' and '{names[targets[row]]}'"
    which = "1 image comes" if len(contradicting_rows) == 1 else f"{len(contradicting_rows)} images come"
    more = ", ..." if len(contradicting_rows) > 1 else ""
    say(f"{which} with two classes: {image} ({classes}){more}; leave it out of one of them")


def _is_new(
    part: Dataset,
    digests: np.ndarray,
    to_relearn: np.ndarray,
    learner: SavedLearner | None,
    bookkeeping: Bookkeeping,
    method: str,
    say: Say,
) -> np.ndarray:
    """The images of ``part`` that the learner does not keep with the same class: bool (N,).

    A folder that has grown since the last task brings its old images again: those that are exemplars would be
    trained on twice, and held-out ones once. A method that learns each image once is spared all that it has
    learned, and copies of an image in one class. The rows ``to_relearn``, which were learned with another class,
    are not left out. Raises a :class:`UserError` if nothing is left.
    """
    once = learns_once(method)
    mixed = with_classes(digests, part.train.targets, part.info.classes)
    is_new = np.ones(len(digests), bool)
    if once:
        is_new[:] = False
        is_new[np.unique(mixed, return_index=True)[1]] = True
        copies = int((~is_new).sum())
        if copies:
            say(f"{copies} of {len(digests)} images are copies of others of their class and are left out")
    if learner is None:
        return is_new
    kept_already = np.zeros(len(digests), bool)
    for split in (learner.held.train, bookkeeping.held_out):
        kept = digests_of(split, learner.hashes)
        kept_already |= np.isin(mixed, with_classes(kept, split.targets, learner.held.info.classes))
    verb, participle = "keeps", "kept"
    if once:
        kept_already |= np.isin(mixed, bookkeeping.learned)
        verb, participle = "has", "known"
    kept_already[to_relearn] = False
    if len(digests) and kept_already.all():
        raise UserError(f"{part.info.name}: the learner {verb} all of its images already; there is nothing to learn")
    number = int(kept_already.sum())
    if number:
        say(f"{number} of {len(digests)} images are {participle} from earlier tasks and are left out")
    return is_new & ~kept_already


def learns_once(method: str) -> bool:
    """Whether the ``method`` adds each image to sums, so that an image that comes again would count twice."""
    return issubclass(registry.learners[method], ClosedForm)


def takes_out(method: str) -> bool:
    """Whether the ``method`` can take an image out of its sums again."""
    learner = registry.learners[method]
    return issubclass(learner, ClosedForm) and learner.takes_out
