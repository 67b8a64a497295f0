"""Looks at images before they are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from pycil_wsc.classifier.check.doubtful_labels import doubtful
from pycil_wsc.classifier.check.near_duplicates import near_pairs, repeated
from pycil_wsc.classifier.check.shift import Shift, compared
from pycil_wsc.classifier.class_names import similar_names
from pycil_wsc.classifier.predict.answers import Answers, numbers_of
from pycil_wsc.classifier.predict.expected import Expected
from pycil_wsc.classifier.predict.images import Key
from pycil_wsc.classifier.store.hashes import as_digests, file_hash, pixel_hash, with_classes
from pycil_wsc.classifier.store.perceptual import NONE, hash_of_picture, perceptual_hash
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.update.corrections import corrections_in
from pycil_wsc.classifier.update.known_images import contradictions, first_alike, learns_once
from pycil_wsc.config.image_config import Config
from pycil_wsc.data.images.image_files import are_pictures, counted, image_status, is_turned
from pycil_wsc.data.images.paths import names_in
from pycil_wsc.data.tasks.growing_dataset import extended
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError, plural
from pycil_wsc.seeding import derived_seed

T = TypeVar("T")
MOST = 1000  # images whose features are compared
HELD_OUT = "a held-out image"
MOST_DOUBTED = 5000  # images whose labels are doubted, a random sample if there are more


@dataclass(frozen=True)
class Findings:
    """What is wrong with images that are to be learned. As text, one line for each finding.

    Args:
        images: how many there are.
        classes: the number of readable images of each class.
        unreadable: (file, why it cannot be read).
        duplicates: (image, what it equals): another of these images or, as text, one that the learner keeps or has
            learned, such as "an exemplar of 'cat'". Images are given by file name, or by position, counted from 0.
        relabelled: (image, the class that it was learned or held out with), of images that come with another one now.
        contradictory: (image, its class, another class with which the same image is there, too).
        near_empty: the classes with few readable images, and how many.
        left_out: suffix -> number of files in the folders that are not read as images.
        near_duplicates: (image, what it nearly equals), as ``duplicates``: images that were saved again or resized.
            Learned images whose perceptual hash an earlier version did not note are not compared.
        in_test: (image, test image) of the same source that is the same or nearly so.
        similar_names: (class, another one, of these images or learned) whose names differ by case or spaces only.
        doubtful: (image, its class, the class that it is more like), the most doubtful first: labels that are probably
            wrong, and some that are right, so these are not part of ``fine``.
        learned_before: the task that was learned from the very same images, counted from 1, or None.
        turned: how many files are turned or mirrored by their EXIF data, as viewers do, too; that is nothing wrong.
        expected: the accuracy to expect on the images of known classes, estimated without their labels
            (:meth:`pycil_wsc.Learner.expected_accuracy`); None if no image is held out.
        shift: how unlike the held-out images of the same classes those of known classes are; None if that was not
            tested, and ``untested`` says why.
    """

    images: int
    classes: dict[str, int]
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    duplicates: list[tuple[Key, Key]] = field(default_factory=list)
    relabelled: list[tuple[Key, str]] = field(default_factory=list)
    near_empty: dict[str, int] = field(default_factory=dict)
    learned_before: int | None = None
    shift: Shift | None = None
    untested: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    expected: Expected | None = None
    near_duplicates: list[tuple[Key, Key]] = field(default_factory=list)
    in_test: list[tuple[Key, Key]] = field(default_factory=list)
    similar_names: list[tuple[str, str]] = field(default_factory=list)
    doubtful: list[tuple[Key, str, str]] = field(default_factory=list)
    turned: int = 0
    contradictory: list[tuple[Key, str, str]] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Whether nothing was found. Files that are left out count if they are pictures by their suffix."""
        lists = [self.unreadable, self.duplicates, self.relabelled, self.near_empty, self.learned_before]
        lists += [self.near_duplicates, self.in_test, self.similar_names, self.contradictory]
        if are_pictures(self.left_out):
            return False
        return not any(lists) and not (self.shift and self.shift.alarm)

    def __str__(self) -> str:
        lines = [f"{plural(self.images, 'image')} of {plural(len(self.classes), 'class')}"]
        lines += [f"unreadable: {why}" for _, why in self.unreadable]
        lines += [f"duplicate: {image} is {other}" for image, other in self.duplicates]
        lines += [f"another class: {image} was '{former}' before" for image, former in self.relabelled]
        lines += [f"two classes: {image} is of '{name}' and of '{other}'" for image, name, other in self.contradictory]
        lines += [f"near-duplicate: {image} is nearly {other}" for image, other in self.near_duplicates]
        lines += [f"in the test: {image} is the test image {other}" for image, other in self.in_test]
        lines += [f"similar names: '{name}' and '{other}'" for name, other in self.similar_names]
        lines += [f"doubtful: {image} of '{name}' looks like '{other}'" for image, name, other in self.doubtful]
        lines += [f"near-empty: '{name}' has {count} readable images" for name, count in self.near_empty.items()]
        if self.left_out:
            lines.append(f"left out: {counted(self.left_out)}")
        if self.turned:
            lines.append(f"turned: {self.turned} of {self.images} images, by their EXIF orientation")
        if self.learned_before:
            lines.append(f"learned before: these images are those of task {self.learned_before}")
        if self.shift:
            verdict = "unlike" if self.shift.alarm else "like"
            against = f"{self.shift.images} images of known classes, {self.shift.known} held out"
            lines.append(f"shift: {verdict} the known images (p = {self.shift.p:.3f}, {against})")
        elif self.untested:
            lines.append(f"shift: not tested, {self.untested}")
        if self.expected:
            beside = f"{self.expected.held_out:.0f} % on the held-out ones"
            lines.append(f"accuracy: {self.expected.accuracy:.0f} % by how confident the answers are, {beside}")
        return "\n".join(lines)


def findings_in(
    part: Dataset, present: SavedLearner | None, answers: Answers | None, config: Config, fewest: int, level: float
) -> Findings:
    """Look at the images of a task before it is learned; see :meth:`pycil_wsc.Learner.check`."""
    split = part.train
    learned_before = _learned_before(part, present)  # first, as it refuses what cannot be learned
    looked = _looked_at(split)
    readable = looked.readable
    kept_images = [] if present is None else list(_kept_images(present))
    kept = _known(present, kept_images)
    known = kept
    if present and learns_once(config.model_name):
        known = _learned(part, looked, present.bookkeeping.learned) | kept
    keys = _keys(split)
    duplicates = _duplicates(keys, looked, known)
    held_out = {sha256: label for sha256, label, what in kept_images if what == HELD_OUT}
    relabelled = _relabelled(part, looked, present, held_out, keys)
    if relabelled:
        changed, here = {image for image, _ in relabelled}, set(keys)
        duplicates = [(image, other) for image, other in duplicates if image not in changed or other in here]
    counts = np.bincount(split.targets[readable], minlength=len(part.info.classes)).tolist()
    classes = dict(zip(part.info.classes, counts, strict=True))
    twice = {image for image, _ in (*duplicates, *relabelled)}
    once = readable & np.fromiter((key not in twice for key in keys), bool, len(split))
    near = [pair for pair in _near_duplicates(keys, looked, present, kept) if pair[0] not in twice]
    shift, untested, expected = _shift(part, once, present, answers, level, config.seed)
    return Findings(
        len(split),
        classes,
        looked.unreadable,
        duplicates,
        relabelled,
        {name: count for name, count in classes.items() if count < fewest},
        learned_before,
        shift,
        untested,
        part.left_out,
        expected,
        near,
        _in_test(part.test, keys, looked),
        similar_names(part.info.classes, present.held.info.classes if present else ()),
        _doubtful(part, keys, once, present, answers, config.seed),
        0 if split.in_memory else sum(map(is_turned, names_in(split.images[readable]))),
        _contradictory(part, looked, keys),
    )


def _contradictory(part: Dataset, looked: Looked, keys: Sequence[Key]) -> list[tuple[Key, str, str]]:
    """Images that are there with two classes: each but the first, its class, and the first one's."""
    rows = np.flatnonzero(looked.readable)
    names, targets = part.info.classes, part.train.targets[rows]
    contradicting_rows = contradictions(_as_items(looked.hashes)[rows], targets)
    return [(keys[rows[row]], names[targets[row]], names[targets[first]]) for row, first in contradicting_rows]


class Looked(NamedTuple):
    """What was seen of N images: little of each, as there may be millions.

    ``hashes``: the SHA-256, uint8 (N, 32). ``readable``: bool (N,); the others have no hash. ``pictures``: the
    perceptual hash, uint64 (N,), or ``NONE``. ``unreadable``: (file, why it cannot be read).
    """

    hashes: np.ndarray
    readable: np.ndarray
    pictures: np.ndarray
    unreadable: list[tuple[str, str]]

    def digests(self, rows: np.ndarray) -> np.ndarray:
        """The first 8 bytes of some hashes: int64 (n,)."""
        return as_digests(self.hashes[row].tobytes().hex() for row in rows.tolist())

    def found_in(self, known: Mapping[bytes, T]) -> Iterator[tuple[int, T]]:
        """The rows of images whose hash is ``known``, and as what."""
        among = np.flatnonzero(self.readable & np.isin(_as_items(self.hashes), _items(known)))
        for row in among.tolist():
            yield row, known[self.hashes[row].tobytes()]


def _items(hashes: Iterable[bytes]) -> np.ndarray:
    return _as_items(np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32))


def _as_items(hashes: np.ndarray) -> np.ndarray:
    """Hashes (N, 32) as values to sort: (N,). As all have 32 bytes, zeros at their ends do no harm."""
    return np.ascontiguousarray(hashes).view("S32").reshape(-1)


def _keys(split: Split) -> Sequence[Key]:
    """What each image is called: its file's name, or its number."""
    return range(len(split)) if split.in_memory else names_in(split.images)


def _looked_at(split: Split) -> Looked:
    number = len(split)
    hashes, readable = np.zeros((number, 32), np.uint8), np.ones(number, bool)
    pictures = np.full(number, NONE)
    unreadable = []
    for row in range(number):
        image = split.images[row]
        try:
            picture = perceptual_hash(Image.fromarray(image)) if split.in_memory else hash_of_picture(str(image))
            sha256 = pixel_hash(image) if split.in_memory else file_hash(str(image))
        except UserError as error:
            readable[row] = False
            unreadable.append((str(image), str(error)))
            continue
        hashes[row] = np.frombuffer(bytes.fromhex(sha256), np.uint8)
        pictures[row] = picture
    return Looked(hashes, readable, pictures, unreadable)


def _near_duplicates(
    keys: Sequence[Key], looked: Looked, present: SavedLearner | None, known: Mapping[bytes, str]
) -> list[tuple[Key, Key]]:
    """Images that nearly equal an earlier one of these, or one that the learner has learned or holds out."""
    rows = np.flatnonzero(looked.pictures != NONE)
    pairs: dict[Key, Key] = {}
    if present is not None:
        pairs |= _near_learned(keys, looked, present, known)
    for place, earlier in repeated(looked.pictures[rows]):
        pairs[keys[int(rows[place])]] = keys[int(rows[earlier])]
    return list(pairs.items())


def _near_learned(
    keys: Sequence[Key], looked: Looked, present: SavedLearner, known: Mapping[bytes, str]
) -> dict[Key, str]:
    """What images nearly equal among those whose perceptual hashes a learner has noted."""
    names, bookkeeping = present.held.info.classes, present.bookkeeping
    noted = bookkeeping.perceptual.existing()
    rows = np.flatnonzero(looked.pictures != NONE)
    rows = rows[~np.isin(looked.digests(rows), bookkeeping.images)]  # the very same is no near-duplicate
    digests = as_digests(sha256.hex() for sha256 in known)
    kept_as = dict(zip(digests.tolist(), known.values(), strict=True))
    pairs: dict[Key, str] = {}
    for place, other in near_pairs(looked.pictures[rows], noted.hashes):
        digest = int(noted.digests[other])
        what = kept_as.get(digest) or _as_learned(digest, names, bookkeeping.learned)
        if what:
            pairs[keys[int(rows[place])]] = what
    return pairs


def _as_learned(digest: int, names: Sequence[str], learned: np.ndarray) -> str:
    """What a learned image is called; "" if the class that it was learned with is there no more."""
    labels = np.arange(len(names))
    mixed = with_classes(np.full(len(names), digest), labels, names)
    found = labels[np.isin(mixed, learned)]
    return f"a learned image of '{names[found[0]]}'" if len(found) else ""


def _in_test(test: Split, keys: Sequence[Key], looked: Looked) -> list[tuple[Key, Key]]:
    """Images that are also, or nearly, among the test images of their source."""
    if not len(test):
        return []
    of_test, test_keys = _looked_at(test), _keys(test)
    near, near_test = np.flatnonzero(looked.pictures != NONE), np.flatnonzero(of_test.pictures != NONE)
    twins: dict[Key, Key] = {}
    for place, other in near_pairs(looked.pictures[near], of_test.pictures[near_test]):
        twins[keys[int(near[place])]] = test_keys[int(near_test[other])]
    by_hash: dict[bytes, Key] = {}
    for row in np.flatnonzero(of_test.readable).tolist():
        by_hash[of_test.hashes[row].tobytes()] = test_keys[row]
    twins |= {keys[row]: other for row, other in looked.found_in(by_hash)}
    return list(twins.items())


def _doubtful(
    part: Dataset,
    keys: Sequence[Key],
    usable: np.ndarray,
    present: SavedLearner | None,
    answers: Answers | None,
    seed: int,
) -> list[tuple[Key, str, str]]:
    """The images whose label is probably wrong, by the features of a learner that has learned something.

    They are compared among themselves, and with the images of known classes whose features the learner keeps.
    """
    if present is None or answers is None:
        return []
    rng = np.random.default_rng(derived_seed(seed, "doubtful"))
    rows = np.sort(rng.permutation(np.flatnonzero(usable))[:MOST_DOUBTED])
    if not len(rows):
        return []
    labels = part.train.targets[rows]
    names = [*part.info.classes, *(name for name in answers.classes if name not in part.info.classes)]
    kept = present.bookkeeping.features
    known = None
    if len(kept):
        known = kept.values.float().numpy(), np.array([names.index(name) for name in answers.classes])[kept.labels]
    chosen, likelier = doubtful(answers.classifier.features(part.train.images[rows]), labels, known)
    triples = zip(rows[chosen].tolist(), labels[chosen].tolist(), likelier.tolist(), strict=True)
    return [(keys[row], names[label], names[other]) for row, label, other in triples]


def _kept_images(present: SavedLearner) -> Iterator[tuple[bytes, int, str]]:
    """The SHA-256 and class of each image that the learner keeps, and what it is."""
    parts = (present.held.train, "an exemplar"), (present.bookkeeping.held_out, HELD_OUT)
    for split, what in parts:
        for image, label in zip(split.images, split.targets.tolist(), strict=True):
            digest = pixel_hash(image) if split.in_memory else present.hashes.get(str(image))
            if digest is not None:
                yield bytes.fromhex(digest), label, what


def _known(present: SavedLearner | None, kept_images: Sequence[tuple[bytes, int, str]]) -> dict[bytes, str]:
    """SHA-256 -> what it is, of the images that the learner keeps."""
    names = present.held.info.classes if present else ()
    return {sha256: f"{what} of '{names[label]}'" for sha256, label, what in kept_images}


def _learned(part: Dataset, looked: Looked, learned: np.ndarray) -> dict[bytes, str]:
    """hash -> what it is, of images that were learned with the same class; ``learned``: as in the bookkeeping."""
    rows = np.flatnonzero(looked.readable)
    labels = part.train.targets[rows]
    mixed = with_classes(looked.digests(rows), labels, part.info.classes)
    again = np.isin(mixed, learned)
    pairs = zip(rows[again].tolist(), labels[again].tolist(), strict=True)
    return {looked.hashes[row].tobytes(): f"a learned image of '{part.info.classes[label]}'" for row, label in pairs}


def _relabelled(
    part: Dataset,
    looked: Looked,
    present: SavedLearner | None,
    held_out: Mapping[bytes, int],
    keys: Sequence[Key],
) -> list[tuple[Key, str]]:
    """The images that were learned, or are held out, with another class, and that class.

    ``held_out``: SHA-256 -> class.
    """
    if present is None:
        return []
    rows = np.flatnonzero(looked.readable)
    digests = looked.digests(rows)
    corrections = corrections_in(digests, part.train.targets[rows], part.info.classes, present)
    before = present.held.info.classes
    former_of = list(zip(rows[corrections.rows].tolist(), corrections.former.tolist(), strict=True))
    former_of += looked.found_in(held_out)
    now = [part.info.classes[label] for label in part.train.targets.tolist()]
    return [(keys[row], before[was]) for row, was in former_of if before[was] != now[row]]


def _duplicates(keys: Sequence[Key], looked: Looked, known: Mapping[bytes, str]) -> list[tuple[Key, Key]]:
    """(image, what it equals): what is ``known``, or the first of these images."""
    items = _as_items(looked.hashes)
    others: dict[int, Key] = {}
    rows = np.flatnonzero(looked.readable)
    first_like = rows[first_alike(items[rows])]
    for row in np.flatnonzero(first_like != rows).tolist():
        others[int(rows[row])] = keys[int(first_like[row])]
    others |= looked.found_in(known)
    return [(keys[row], others[row]) for row in sorted(others)]


def _learned_before(part: Dataset, present: SavedLearner | None) -> int | None:
    """The task with the same images and class names, counted from 1; files that are not there do not count.

    Raises a :class:`UserError` for images of another form or size than those of earlier tasks.
    """
    train = part.train
    if not train.in_memory:
        there = np.fromiter(map(_is_there, names_in(train.images)), bool, len(train))
        if not there.any():
            return None
        if not there.all():
            part = replace(part, train=Split(train.images[there], train.targets[there]), fingerprint=None)
    none = Split(part.test.images[:0], part.test.targets[:0])
    stream = extended(present.held if present else None, replace(part, test=none))
    *earlier, new = [task["sha256"] for task in (stream.fingerprint or {})["tasks"]]
    return earlier.index(new) + 1 if new in earlier else None


def _is_there(path: str) -> bool:
    """Whether there is an image file: no link that leads nowhere, no pipe, ..."""
    try:
        image_status(path)
    except UserError:
        return False
    return True


def _shift(
    part: Dataset,
    usable: np.ndarray,
    present: SavedLearner | None,
    answers: Answers | None,
    level: float,
    seed: int,
) -> tuple[Shift | None, str, Expected | None]:
    """The test of features, or why there is none, and the accuracy to expect."""
    if present is None or answers is None:
        return None, "nothing has been learned yet", None
    held_out = present.bookkeeping.held_out
    if not len(held_out):
        return None, "the learner holds out no images; start it with held_out=20", None
    rng = np.random.default_rng(derived_seed(seed, "check"))
    labels = numbers_of(part.train.targets, part.info.classes, answers.classes)
    rows = np.flatnonzero(usable & (labels >= 0))
    rows = np.sort(rng.permutation(rows)[:MOST])
    others = np.sort(rng.permutation(len(held_out))[:MOST])
    new = answers.classifier.features(part.train.images[rows]), labels[rows]
    known = answers.classifier.features(held_out.images[others]), held_out.targets[others]
    shift = compared(new, known, level, rng)
    untested = "" if shift else "too few images of classes that have held-out ones"
    if not len(rows) or not answers.features.held_out.any():
        return shift, untested, None
    logits = answers.classifier.classified(torch.from_numpy(new[0]).to(answers.device))
    return shift, untested, answers.expected_of(logits.cpu())
