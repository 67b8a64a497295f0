"""Saves a learner between two tasks in a folder, so that it can be trained further without the data of earlier tasks.

=======================  ==========================================================================================
``learner.safetensors``  the learner: its configuration, classes, image transforms, exemplars and state (a file of
                         :mod:`pycil_wsc.state`, checksummed and replaced atomically)
``parts/``               its large tensors (:mod:`pycil_wsc.classifier.store.parts`)
``versions/``            earlier versions of this file (:mod:`pycil_wsc.classifier.store.versions`)
``exemplars/``           copies of the exemplars' image files, if requested, each named by the hash of its content
``.last_version``        the highest number that a version has had
``.lock``                held while a learner is saved
=======================  ==========================================================================================

Whatever else is in the folder stays as it is. Image files are exemplars by name, with the hash of their content; names
within the folder are relative, so that the folder can be moved.
"""

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from pycil_wsc.classifier.predict.arguments import refusing
from pycil_wsc.classifier.predict.features import Features
from pycil_wsc.classifier.predict.rebuild import checked_info
from pycil_wsc.classifier.store import versions
from pycil_wsc.classifier.store.bookkeeping import Bookkeeping, problem_of
from pycil_wsc.classifier.store.exemplar_files import name_of, remove_copies
from pycil_wsc.classifier.store.parts import MissingPart, read_parts, remove_others, write_parts
from pycil_wsc.classifier.store.perceptual import PerceptualHashes
from pycil_wsc.classifier.store.saved_learner import SavedLearner
from pycil_wsc.classifier.store.versions import FILE
from pycil_wsc.config.dropped import without_dropped
from pycil_wsc.data.images.paths import compact
from pycil_wsc.data.types import Arrivals, Dataset, DatasetInfo, Split
from pycil_wsc.errors import UserError
from pycil_wsc.runs.checkpoint import PARTS
from pycil_wsc.runs.journal import new_curves
from pycil_wsc.state import State, load_state, save_state
from pycil_wsc.training.learner_state import parts_of

COMPLETE = "a complete saved learner", "save or copy it again"
FORMAT = 2


# ---- writing ---------------------------------------------------------------------------------------------------------


def exists(folder: Path) -> bool:
    """Whether a learner is saved in ``folder``."""
    return os.path.isfile(folder / FILE)


def write(
    folder: Path,
    learner: SavedLearner,
    copy_images: bool = False,
    limit: int = 1,
    parent: int | None = None,
    known: int = 0,
) -> int:
    """Save ``learner`` in ``folder``, replacing one saved there before. Only one process at a time may do so.

    The folder holds the old learner or the new one at any moment. Nothing but files of the old one is removed.

    Args:
        folder: where to.
        learner: what to save.
        copy_images: copy the exemplars' image files too, except for those that are in the folder already.
        limit: the number of versions to keep, the new one included.
        parent: the number of the version that it was learned from, if that was in ``folder``.
        known: a number that a version of ``folder`` has had; 0 if none is known.

    Returns:
        The number of the version.
    """
    held = learner.held
    bookkeeping = learner.bookkeeping
    assert held.arrivals is not None
    exemplars = _packed(held.train, folder, learner.hashes, copy_images)
    held_out = _packed(bookkeeping.held_out, folder, learner.hashes, copy_images)
    number = versions.next_number(folder, known)
    ledger = {
        "held_out": held_out,
        "per_class": bookkeeping.per_class,
        "temperature": bookkeeping.temperature,
        "entries": list(bookkeeping.entries),
        "learned": torch.from_numpy(np.setdiff1d(bookkeeping.learned, bookkeeping.images)),
        "images": torch.from_numpy(bookkeeping.images),
        "perceptual": _of_perceptual(bookkeeping.perceptual),
        "features": _of_features(bookkeeping.features),
        "notes": bookkeeping.notes,
    }
    content = {
        "format": FORMAT,
        "version": number,
        "parent": parent,
        "config": learner.config,
        "info": dataclasses.asdict(held.info),
        "seen": list(held.arrivals.seen),
        "data": held.fingerprint,
        "exemplars": exemplars | {"tasks": torch.from_numpy(held.arrivals.train)},
        "run": learner.state,
        "ledger": ledger,
    }
    if limit > 1:
        versions.keep_present(folder)
    versions.note_number(folder, number)
    save_state(folder / FILE, content, functools.partial(write_parts, folder, held.info.num_classes))
    _tidy(folder, limit)
    return number


def _tidy(folder: Path, limit: int) -> None:
    """Remove the versions beyond ``limit``, and parts and copies of images that none of the others needs."""
    try:
        versions.remove_oldest(folder, limit)
        used = versions.used_by_any(folder)
        if used is not None:
            images, parts = used
            remove_copies(folder, keep=images)
            remove_others(folder, keep=parts)
    except OSError as error:  # the learner is saved all the same
        logging.getLogger("pycil_wsc.learner").warning(
            "%s: an earlier version or its images cannot be removed (%s); the next save tries again", folder, error
        )


def _packed(split: Split, folder: Path, hashes: Mapping[str, str], copy_images: bool) -> State:
    """Images and labels as they are saved in ``folder``."""
    labels = {"labels": torch.from_numpy(split.targets)}
    if split.in_memory:
        return labels | {"pixels": torch.from_numpy(np.ascontiguousarray(split.images))}
    paths = split.images.tolist()
    names = [name_of(path, folder, hashes[path], copy_images) for path in paths]
    return labels | {"files": names, "sha256": [hashes[path] for path in paths]}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path, version: int | None = None) -> tuple[SavedLearner, int]:
    """Read what :func:`write` wrote, and the number of its version.

    ``version``: the number of one that is kept; None: the present one. Raises a :class:`UserError` if it is missing or
    damaged, or not a learner.
    """
    what, remedy = COMPLETE
    others = [number for number in versions.kept(folder) if number]
    if not exists(folder):
        if not others:
            raise UserError(f"{folder}: no saved learner there; give a folder written by Learner.save")
        if version is None:
            raise UserError(f"{folder}: {FILE} is missing; load another version, such as version={others[-1]}")
    if version is None and others:
        remedy = f"its present version is damaged: load another one, such as version={others[-1]}, or {remedy}"
    with refusing(folder, what, remedy):
        content = _content_of(folder, version)
        if content["format"] != FORMAT:
            raise UserError(f"{folder}: was saved by another version (format {content['format']}); use that one")
        number, _ = versions.numbers_in(content)
        return _checked(folder, content), number


def _content_of(folder: Path, version: int | None) -> State:
    """The content of a version, None: the present one.

    Its file may be moved meanwhile, or removed with its parts, as another process saves; then it is looked for again.
    """
    while True:
        before = versions.signature(folder)
        path = folder / FILE if version is None else versions.find(folder, version)
        try:
            content = load_state(path, functools.partial(read_parts, folder))
        except (FileNotFoundError, MissingPart):
            is_removed = version is not None and not path.exists()  # the search then says so
            if versions.signature(folder) == before and not is_removed:
                raise
            continue
        if version is None or content["version"] == version:
            return content
        if versions.signature(folder) == before:
            raise UserError(f"{folder}: {path.name} is not version {version}; save or copy it again")


def _checked(folder: Path, content: State) -> SavedLearner:
    """The learner with this content; raises an exception if its parts do not fit together."""
    state = content["run"]
    config = without_dropped(content["config"])
    info = checked_info(content["info"])
    seen = tuple(content["seen"])
    _check(bool(seen) and all(type(number) is int for number in seen), "numbers of classes")
    _check(list(seen) == sorted(seen) and 0 < seen[0] and seen[-1] == info.num_classes, "numbers of classes")
    train, hashes = _unpacked(content["exemplars"], folder, info)
    labels, tasks = train.targets, np.asarray(content["exemplars"]["tasks"], np.int64)
    _check(labels.shape == tasks.shape, "exemplars and labels")
    _check(not len(labels) or 0 <= labels.min() <= labels.max() < seen[-1], "labels")
    _check(not len(tasks) or 0 <= tasks.min() <= tasks.max() < len(seen), "tasks")
    _check(isinstance(config, dict) and len(config["tasks"]) == len(seen), "configuration")
    _check(isinstance(config["tasks"], list) and all(isinstance(name, str) for name in config["tasks"]), "tasks")
    _check_state(state, len(seen), labels)
    _check_fingerprint(content["data"], len(seen))
    bookkeeping, more = _bookkeeping_of(content["ledger"], folder, info)
    hashes |= more
    problem = problem_of(bookkeeping, seen[-1], len(seen))
    _check(not problem, problem)
    none = Split(train.images[:0], labels[:0])
    arrivals = Arrivals(seen, tasks, tasks[:0])
    exemplars = Dataset(info, train, none, 0.0, content["data"], arrivals)
    return SavedLearner(config, exemplars, state, hashes, bookkeeping)


def _bookkeeping_of(stored: State, folder: Path, info: DatasetInfo) -> tuple[Bookkeeping, dict[str, str]]:
    """The bookkeeping with this content, and the hashes of its files."""
    held_out, hashes = _unpacked(stored["held_out"], folder, info)
    learned = np.asarray(stored["learned"])
    images = np.asarray(stored["images"])
    perceptual = _perceptual_of(stored["perceptual"]) if "perceptual" in stored else PerceptualHashes()  # not noted yet
    bookkeeping = Bookkeeping(
        held_out=held_out,
        per_class=stored["per_class"],
        temperature=stored["temperature"],
        entries=tuple(stored["entries"]),
        learned=np.union1d(learned, images) if len(images) else learned,
        images=images,
        perceptual=perceptual,
        features=_features_of(stored["features"]),
        notes=stored["notes"],
    )
    return bookkeeping, hashes


def _of_perceptual(perceptual: PerceptualHashes) -> State:
    return {
        "digests": torch.from_numpy(perceptual.digests),
        "hashes": torch.from_numpy(perceptual.hashes.view(np.int64)),  # safetensors of old torch have no uint64
    }


def _perceptual_of(stored: State) -> PerceptualHashes:
    """What :func:`_of_perceptual` made."""
    return PerceptualHashes(np.asarray(stored["digests"]), np.asarray(stored["hashes"]).view(np.uint64))


def _of_features(features: Features) -> State:
    return {
        "values": features.values,
        "labels": torch.from_numpy(features.labels),
        "digests": torch.from_numpy(features.digests),
        "held_out": torch.from_numpy(features.held_out),
    }


def _features_of(stored: State) -> Features:
    """What :func:`_of_features` made."""
    return Features(stored["values"], *(np.asarray(stored[name]) for name in ("labels", "digests", "held_out")))


def _unpacked(stored: State, folder: Path, info: DatasetInfo) -> tuple[Split, dict[str, str]]:
    """What :func:`_packed` packed, and the hashes of the files."""
    labels = np.asarray(stored["labels"], np.int64)
    hashes: dict[str, str] = {}
    if "files" in stored:
        names = stored["files"]
        paths = [os.path.join(folder, name) for name in names]
        _check(all(b"\0" not in os.fsencode(path) for path in paths), "names of files")
        images = compact(paths)
        hashes = dict(zip(paths, stored["sha256"], strict=True))
        _check(all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes.values()), "hashes")
    else:
        images = np.asarray(stored["pixels"])
        side = info.stored_size or info.image_size
        _check(images.dtype == np.uint8 and images.shape[1:] == (side, side, 3), "pixels")
    _check(images.shape[:1] == labels.shape, "images and labels")
    return Split(images, labels), hashes


def _check_state(state: State, tasks: int, labels: np.ndarray) -> None:
    """Check the state of a run after ``tasks`` tasks, whose exemplars have these ``labels``.

    The tensors are checked where they are loaded into a network.
    """
    _check(PARTS <= state.keys() and state["optimizer"] is None, "parts")
    _check(isinstance(state["records"]["lines"], list) and isinstance(state["records"]["observers"], dict), "records")
    _check(state["position"] == {"task": tasks, "phase": 0, "epoch": 0} and state["curves"] == new_curves(), "position")
    history = state["history"]
    _check(isinstance(history, list) and [line["task"] for line in history] == list(range(tasks)), "history")
    for line in history:
        _check(all(isinstance(loss, float) for loss in line["train_loss"]), "history")
        _check(_numbers(line["num_seen"], line["exemplars"], line["total_seconds"]), "history")
    _check(state["anytime"]["curve"] == [] and _numbers(state["anytime"]["steps"]), "tests within a task")
    clock = state["clock"]
    _check({"train_seconds", "total_seconds", "saved_seconds"} == clock.keys() and _numbers(*clock.values()), "clock")
    _check(_numbers(state["peak_memory"]), "memory")
    extra = parts_of(state["learner"])
    _check(_numbers(extra["images_trained"], extra["train_flops"], extra["memory"]["seen"]), "counts")
    _check(extra["images_trained"] == history[-1]["images_trained"], "counts")
    _check(extra["memory"]["tasks"] == tasks, "counts")
    seen_by_class = extra["memory"]["seen_by_class"]
    _check(_numbers(*seen_by_class.keys(), *seen_by_class.values()), "counts")
    memory = extra["memory"]["classes"]
    held = [index for indices in memory.values() for index in indices]
    _check(sorted(held) == list(range(len(labels))), "memory")
    _check(all(labels[index] == label for label, indices in memory.items() for index in indices), "memory")
    slots = extra["memory"].get("slots")  # of a memory that steps fill, which may have an image twice
    _check(slots is None or set(slots) == set(held), "memory")
    _check(slots is None or [labels[slot] for slot in slots] == extra["memory"]["labels"], "memory")
    for stored in extra["stored"].values():
        indices = stored["indices"].tolist()
        if slots is not None:
            _check(indices == slots and len(slots) == len(stored["values"]), "values")
            continue
        _check(set(indices) <= set(held) and len(set(indices)) == len(indices) == len(stored["values"]), "values")


def _check_fingerprint(data: State, tasks: int) -> None:
    """Check the fingerprint of a stream of ``tasks`` tasks (:mod:`pycil_wsc.data.tasks.growing_dataset`)."""
    _check(len(data["tasks"]) == tasks, "fingerprint")
    for part in (data, *data["tasks"]):
        _check(type(part["train"]) is type(part["test"]) is int and isinstance(part["sha256"], str), "fingerprint")


def _numbers(*values: object) -> bool:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return len(numbers) == len(values) and all(0 <= number < math.inf for number in numbers)


def _check(fits: object, what: str) -> None:
    if not fits:
        raise ValueError(f"{what}: not what the rest needs")
