"""Saves a learner between two tasks in a folder, so that it can be trained further without the data of earlier tasks.

=======================  ==========================================================================================
``learner.safetensors``  the learner: its configuration, classes, image transforms, exemplars and state (one file of
                         :mod:`pycil_wsc.state`, checksummed and replaced atomically)
``exemplars/``           copies of the exemplars' image files, if requested, each named by the hash of its content
``.lock``                held while a learner is saved
=======================  ==========================================================================================

Whatever else is in the folder stays as it is. Image files are exemplars by name, with the hash of their content; names
within the folder are relative, so that the folder can be moved.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pycil_wsc import old_formats
from pycil_wsc.classifier.inference import checked_info
from pycil_wsc.config.options import KEYS
from pycil_wsc.data.types import Arrivals, Dataset, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import write_atomically
from pycil_wsc.keys import without_replaced
from pycil_wsc.runs.checkpoint import PARTS
from pycil_wsc.runs.journal import new_curves
from pycil_wsc.state import load_state, save_state

FILE = "learner.safetensors"
COPIES = "exemplars"
FORMAT = 2  # 1 had several files: pycil_wsc.old_formats


class SavedLearner(NamedTuple):
    """The contents of a folder.

    ``config``: the configuration's values; ``held``: the exemplars, as a stream without test images; ``state``: that of
    :meth:`pycil_wsc.runs.run.Run.state`; ``hashes``: the SHA-256 of the exemplars' files by name, except of those that
    an earlier version saved.
    """

    config: dict[str, Any]
    held: Dataset
    state: dict[str, Any]
    hashes: dict[str, str]


# ---- writing ---------------------------------------------------------------------------------------------------------


def exists(folder: Path) -> bool:
    """Whether a learner is saved in ``folder``."""
    return os.path.isfile(folder / FILE) or old_formats.has_learner(folder)


def write(folder: Path, learner: SavedLearner, copy_images: bool = False) -> None:
    """Save ``learner`` in ``folder``, replacing one saved there before. Only one process at a time may do so.

    The folder holds the old learner or the new one at any moment. Nothing but files of the old one is removed.

    ``copy_images``: copy the exemplars' image files too, except for those that are in the folder already.
    """
    held = learner.held
    assert held.arrivals is not None
    exemplars: dict[str, Any] = {
        "labels": torch.from_numpy(held.train.targets),
        "tasks": torch.from_numpy(held.arrivals.train),
    }
    names: list[str] = []
    if held.train.in_memory:
        exemplars["pixels"] = torch.from_numpy(held.train.images)
    else:
        paths = held.train.images.tolist()
        names = [_name(path, folder, learner.hashes.get(path), copy_images) for path in paths]
        exemplars["files"] = names
        exemplars["sha256"] = [learner.hashes.get(path) for path in paths]
    content = {
        "format": FORMAT,
        "config": learner.config,
        "info": dataclasses.asdict(held.info),
        "seen": list(held.arrivals.seen),
        "data": held.fingerprint,
        "exemplars": exemplars,
        "run": learner.state,
    }
    save_state(folder / FILE, content)
    old_formats.remove_learner(folder)
    _remove_copies(folder, keep=set(names))


def _name(path: str, folder: Path, sha256: str | None, copy: bool) -> str:
    """The name by which ``folder`` refers to the image file ``path``: within the folder, or an absolute path."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    if not inside.startswith(os.pardir):
        return inside
    if not copy:
        return os.path.abspath(path)
    content = _content(path)
    if sha256 not in (None, found := _sha256(content)):
        raise UserError(f"{path}: is another image than the one that was learned; restore the exemplar's file")
    name = f"{COPIES}/{found[:32]}{Path(path).suffix}"
    if not _is_copy(folder / name):
        write_atomically(folder / name, content, durable=False)
    return name


def _remove_copies(folder: Path, keep: set[str]) -> None:
    """Remove copies that no exemplar needs now, of an earlier learner or of a save that did not end."""
    copies = folder / COPIES
    if not copies.is_dir():
        return
    for path in list(copies.iterdir()):
        if f"{COPIES}/{path.name}" not in keep and (_is_copy(path) or _is_unfinished_copy(path)):
            path.unlink()
    with contextlib.suppress(OSError):  # it has other files
        copies.rmdir()


def _is_copy(path: Path) -> bool:
    """Whether a file is named by the hash of its content, as copies are."""
    named = re.fullmatch(r"[0-9a-f]{32}", path.stem)
    return bool(named) and path.is_file() and _sha256(path.read_bytes())[:32] == path.stem


def _is_unfinished_copy(path: Path) -> bool:
    return bool(re.fullmatch(r"\.[0-9a-f]{32}(\.\w+)?\.partial", path.name))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> SavedLearner:
    """Read what :func:`write` wrote. Raises a :class:`UserError` if it is missing or damaged, or not a learner."""
    path = folder / FILE
    if not exists(folder):
        raise UserError(f"{folder}: no saved learner there; give a folder written by Learner.save")
    try:
        content = load_state(path) if os.path.isfile(path) else old_formats.load_learner(folder)
        known = content["format"] in (1, FORMAT)
        if known:
            return _checked(folder, content)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror or error}); make it readable") from None
    except Exception as error:  # damaged files and files of other programs raise many kinds of errors
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}: is not a complete saved learner ({reason}); save or copy it again") from None
    raise UserError(f"{folder}: was saved by another version (format {content['format']}); use that one")


def _checked(folder: Path, content: Mapping[str, Any]) -> SavedLearner:
    """The learner with this content; raises an exception if its parts do not fit together."""
    stored, state = content["exemplars"], content["run"]
    config = without_replaced(content["config"], KEYS)
    lists = {name: tuple(content["info"][name]) for name in ("classes", "mean", "std")}  # format 1 has no tuples
    info = checked_info({**content["info"], **lists})
    seen = tuple(content["seen"])
    _check(bool(seen) and all(type(number) is int for number in seen), "numbers of classes")
    _check(list(seen) == sorted(seen) and 0 < seen[0] and seen[-1] == info.num_classes, "numbers of classes")
    labels, tasks = (np.asarray(stored[name], np.int64) for name in ("labels", "tasks"))
    if "files" in stored:
        paths = [os.path.join(folder, name) for name in stored["files"]]
        images = np.array(paths, dtype=str)
        pairs = zip(paths, stored["sha256"], strict=True)
        hashes = {path: digest for path, digest in pairs if digest is not None}  # format 1 has none
        _check(all(isinstance(digest, str) for digest in hashes.values()), "hashes")
    else:
        images, hashes = np.asarray(stored["pixels"]), {}
        side = info.stored_size or info.image_size
        _check(images.dtype == np.uint8 and images.shape[1:] == (side, side, 3), "pixels")
    _check(images.shape[:1] == labels.shape == tasks.shape, "exemplars and labels")
    _check(not len(labels) or 0 <= labels.min() <= labels.max() < seen[-1], "labels")
    _check(not len(tasks) or 0 <= tasks.min() <= tasks.max() < len(seen), "tasks")
    _check(isinstance(config, dict) and len(config["tasks"]) == len(seen), "configuration")
    _check_state(state, len(seen), labels)
    _check_fingerprint(content["data"], len(seen))
    none = Split(images[:0], labels[:0])
    arrivals = Arrivals(seen, tasks, tasks[:0])
    exemplars = Dataset(info, Split(images, labels), none, 0.0, content["data"], arrivals)
    return SavedLearner(config, exemplars, state, hashes)


def _check_state(state: Mapping[str, Any], tasks: int, labels: np.ndarray) -> None:
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
    clock = state["clock"]
    _check({"train_seconds", "total_seconds", "saved_seconds"} == clock.keys() and _numbers(*clock.values()), "clock")
    _check(_numbers(state["peak_memory"]), "memory")
    extra = state["learner"]["_extra_state"]
    _check(_numbers(extra["images_trained"], extra["train_flops"], extra["memory"]["seen"]), "counts")
    _check(extra["images_trained"] == history[-1]["images_trained"], "counts")
    _check(extra["memory"].get("tasks", tasks) == tasks, "counts")  # missing in learners of earlier versions
    memory = extra["memory"]["classes"]
    held = [index for indices in memory.values() for index in indices]
    _check(sorted(held) == list(range(len(labels))), "memory")
    _check(all(labels[index] == label for label, indices in memory.items() for index in indices), "memory")
    for stored in extra.get("stored", {}).values():  # missing in learners of earlier versions
        indices = stored["indices"].tolist()
        _check(set(indices) <= set(held) and len(set(indices)) == len(indices) == len(stored["values"]), "values")


def _check_fingerprint(data: Any, tasks: int) -> None:
    """Check the fingerprint of a stream of ``tasks`` tasks (:mod:`pycil_wsc.data.stream`)."""
    _check(len(data["tasks"]) == tasks, "fingerprint")
    for each in (data, *data["tasks"]):
        _check(type(each["train"]) is type(each["test"]) is int and isinstance(each["sha256"], str), "fingerprint")


def _numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) and 0 <= value < math.inf for value in values)


def _check(fits: Any, what: str) -> None:
    if not fits:
        raise ValueError(f"its {what} do not fit the rest")


# ---- the exemplars' files --------------------------------------------------------------------------------------------


def hashes_of(held: Dataset, known: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of each exemplar's file: the ``known`` one, or that of its present content."""
    if held.train.in_memory:
        return {}
    return {path: known.get(path) or _sha256(_content(path)) for path in held.train.images.tolist()}


def check_exemplars(held: Dataset, hashes: Mapping[str, str]) -> None:
    """Raise a :class:`UserError` that names the first exemplar whose file is gone or has another content now."""
    if held.train.in_memory:
        return
    paths = held.train.images.tolist()
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise UserError(
            f"{missing[0]}: no longer exists, one of {len(missing)} missing files of exemplars; restore them, or "
            "save the learner with copy_images=True before the images are removed"
        )
    for path in paths:
        if path in hashes and _sha256(_content(path)) != hashes[path]:
            raise UserError(f"{path}: is another image than the exemplar that was learned; restore the exemplar's file")


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore the exemplar's file") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
