"""Fingerprints of data sets: the number of samples and a hash, which identify the data that a run used.

For arrays, the hash covers every pixel and label, but not the class names. For image files, it covers their paths
relative to the data set's folder and their sizes in bytes, but not their contents: reading 150 GB of ImageNet before
each run would take too long. An image replaced by another of exactly the same size therefore goes unnoticed.
Modification times are ignored, because copying a folder to another machine changes them. The same data under another
path have the same fingerprint. That of image files says how they are decoded (``decoding``): the same files once became
other pixels if they were transparent or turned by their EXIF data.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pycil_wsc.data.images.image_files import DECODING, common_folder, image_status
from pycil_wsc.data.images.paths import folders_in, names_in
from pycil_wsc.data.types import Dataset, Fingerprint, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file, write_atomically

WEIGHTS = "pretrained"  # in a fingerprint, the hash of a file of pre-trained weights
DECODED_AS = "decoding"  # in a fingerprint of image files, how they are decoded; 0.1.0 did not note it
SETTLED = 2.0  # seconds: a second change within this time might leave the modification time unchanged


def fingerprint(train: Split, test: Split) -> Fingerprint:
    """Return ``{"train": samples, "test": samples, "sha256": the first 16 hexadecimal digits}``.

    That of image files has ``decoding``, too. Raises a :class:`UserError` that names an image file if there is no such
    file.
    """
    digest = hashlib.sha256()
    base = None if train.in_memory else common_folder([*folders_in(train.images), *folders_in(test.images)])
    for split in (train, test):
        digest.update(repr(split.images.shape).encode())
        digest.update(split.targets.astype("<i8").tobytes())
        if base is None:
            digest.update(np.ascontiguousarray(split.images).data)
            continue
        for line in _listing(split.images, base):
            digest.update(line)
    described = {"train": len(train), "test": len(test), "sha256": digest.hexdigest()[:16]}
    return described if base is None else described | {DECODED_AS: DECODING}


def fingerprint_of_file(path: Path, read: os.stat_result, train: Split, test: Split) -> Fingerprint:
    """:func:`fingerprint` of the arrays read from ``path``, cached beside it until the file's size or times change.

    ``read``: the file's status when it was read. If the folder cannot be written, the hash is computed each time: a
    second for 500 MB.
    """
    cache = path.with_name(f".{path.name}.fingerprint")
    state = {"size": read.st_size, "modified": read.st_mtime_ns, "changed": read.st_ctime_ns}
    known = _read(cache)
    if all(known.get(name) == value for name, value in state.items()):
        return {name: known[name] for name in ("train", "test", "sha256")}
    described = fingerprint(train, test)
    if time.time() - max(read.st_mtime, read.st_ctime) > SETTLED:
        with contextlib.suppress(UserError):  # the folder cannot be written
            write_atomically(cache, json.dumps(state | described) + "\n")
    return described


def with_weights(dataset: Dataset, pretrained: bool | str) -> Dataset:
    """``dataset`` with the hash of the file of ``pretrained`` weights in its fingerprint: other weights are other data.

    A name that is not a readable file changes nothing.
    """
    digest = hash_of_weights(pretrained)
    if digest is None or dataset.fingerprint is None:
        return dataset
    return replace(dataset, fingerprint=dataset.fingerprint | {WEIGHTS: digest})


def hash_of_weights(pretrained: bool | str) -> str | None:
    """The first 16 hexadecimal digits of the hash of a file of weights; None if it is not a readable file."""
    try:
        status = os.stat(pretrained) if isinstance(pretrained, str) else None
        return status and _hash(str(pretrained), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=8)
def _hash(path: str, *status: int) -> str:
    """The hash of a file that has this ``status``."""
    return hashlib.sha256(read_file(path)).hexdigest()[:16]


def changed(before: Fingerprint | None, now: Fingerprint | None) -> str:
    """Describe the difference between two fingerprints, with the hashes of pre-trained weights that both have.

    Empty if they are equal, if ``now`` is that of the same stream with more tasks, or if one of them is unknown. How
    image files are decoded does not count, as most become the same pixels in any case: see :func:`decoded_otherwise`.
    """
    if not isinstance(before, dict) or not before or not now:
        return ""
    weights = before.get(WEIGHTS), now.get(WEIGHTS)
    if all(weights) and weights[0] != weights[1]:
        return f"then pre-trained weights of sha256 {weights[0]}, now {weights[1]}"
    before, now = _of_files(before), _of_files(now)
    if before == now:
        return ""
    if "tasks" in before and before["tasks"] == now.get("tasks", [])[: len(before["tasks"])]:
        return ""
    return f"then {_described(before)}, now {_described(now)}"


def decoded_otherwise(before: Fingerprint | None, now: Fingerprint | None) -> bool:
    """Whether image files of ``before`` were decoded in another way than those of ``now``, as by 0.1.0."""
    decodings = _decodings(now)
    return isinstance(before, dict) and bool(before) and bool(decodings) and not _decodings(before) <= decodings


def _decodings(data: Fingerprint | None) -> set[int | None]:
    """How the image files of all tasks are decoded; empty for arrays, {None} for files in records that do not say."""
    tasks = (data or {}).get("tasks", [data or {}])
    return {task.get(DECODED_AS) for task in tasks}


def _of_files(data: Fingerprint) -> Fingerprint:
    """A fingerprint without what is not the data set's: the weights, and how images are decoded, also in its tasks."""
    of_data = {name: value for name, value in data.items() if name not in (WEIGHTS, DECODED_AS)}
    if "tasks" in of_data:
        of_data["tasks"] = [_of_files(task) for task in of_data["tasks"]]
    return of_data


def _listing(paths: np.ndarray, base: str) -> Iterator[bytes]:
    """One line per file: its size and its path relative to ``base``."""
    normalised = os.path.abspath if os.path.isabs(base) else os.path.normpath
    base = normalised(base) if base else ""
    for path in names_in(paths):
        relative = normalised(path).removeprefix(base)
        yield b"%d %s\0" % (image_status(path).st_size, os.fsencode(relative))


def _read(cache: Path) -> Fingerprint:
    """The cached fingerprint, or {} if there is none or it is damaged."""
    try:
        known = json.loads(read_file(cache))
        return known if {"train", "test", "sha256"} <= set(known) else {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _described(data: Fingerprint) -> str:
    return f"{data.get('train')} training and {data.get('test')} test samples, sha256 {data.get('sha256')}"
