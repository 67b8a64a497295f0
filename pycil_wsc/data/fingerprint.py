"""Which data a run was made with: the number of samples, and a hash of what they are.

Of arrays the hash covers every pixel and label, but not the class names. Of image files it covers their paths below the
data set's folder and their sizes in bytes, but not their contents: reading 150 GB of ImageNet before each run would
take longer than the check is worth. An image that is replaced by another of exactly the same size goes unnoticed.
Modification times do not count, because copying a folder to another machine changes them. The same data under another
path have the same fingerprint.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import write_atomically

SETTLED = 2.0  # seconds after a change within which a second one might leave the modification time as it is


def fingerprint(train: Split, test: Split) -> dict[str, Any]:
    """``{"train": samples, "test": samples, "sha256": the first 16 hexadecimal digits}``.

    :class:`UserError` names an image file that is not there.
    """
    digest = hashlib.sha256()
    base = None if train.in_memory else os.path.commonpath([*train.images, *test.images])
    for split in (train, test):
        digest.update(repr(split.images.shape).encode())
        digest.update(split.targets.astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(split.images).data if base is None else _listing(split.images, base))
    return {"train": len(train), "test": len(test), "sha256": digest.hexdigest()[:16]}


def fingerprint_of_file(path: Path, read: os.stat_result, train: Split, test: Split) -> dict[str, Any]:
    """The same for the arrays that were read from ``path``, kept beside it for as long as the file is not changed.

    ``read``: the file's status when it was read. "Not changed" means: the same size and times. Where the folder cannot
    be written, the hash is computed each time: a second for 500 MB.
    """
    cache = path.with_name(f".{path.name}.fingerprint")
    state = {"size": read.st_size, "modified": read.st_mtime_ns, "changed": read.st_ctime_ns}
    known = _read(cache)
    if all(known.get(name) == value for name, value in state.items()):
        return {name: known[name] for name in ("train", "test", "sha256")}
    found = fingerprint(train, test)
    if time.time() - max(read.st_mtime, read.st_ctime) > SETTLED:
        try:
            write_atomically(cache, json.dumps(state | found) + "\n")
        except UserError:
            pass  # a folder that cannot be written
    return found


def changed(before: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    """What tells the two apart, in a few words; nothing if they are the same, if the tasks of a stream were followed by
    others, or if one is not known.
    """
    if not before or not now or before == now:
        return ""
    if "tasks" in before and before["tasks"] == now.get("tasks", [])[: len(before["tasks"])]:
        return ""
    return f"then {_described(before)}, now {_described(now)}"


def _listing(paths: np.ndarray, base: str) -> bytes:
    """A line of each file's path below ``base`` and its size."""
    lines = []
    for path in paths.tolist():
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; replace the image, or remove it") from None
        lines.append(b"%d %s\0" % (size, os.fsencode(os.path.normpath(path).removeprefix(base))))
    return b"".join(lines)


def _read(cache: Path) -> dict[str, Any]:
    """The cached fingerprint, or {} if there is none or it is damaged."""
    try:
        known = json.loads(cache.read_bytes())
        return known if {"train", "test", "sha256"} <= set(known) else {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _described(data: dict[str, Any]) -> str:
    return f"{data.get('train')} training and {data.get('test')} test images, sha256 {data.get('sha256')}"
