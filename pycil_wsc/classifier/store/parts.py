"""Large tensors of a saved learner in files of their own, ``parts/<SHA-256>.safetensors``, which its versions share.

A save writes those that are not there yet: a backbone that stays as it is, once. A tensor with a row for each class is
cut into blocks of some rows, so that a save after an image of one class writes one block.

Parts are written before the version that lists them, and removed after the last version that does, so that a process
that dies in between leaves at most some that no version lists. The next save removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from pycil_wsc.files import read_file, write_atomically
from pycil_wsc.state import serialised

FOLDER = "parts"
SMALLEST = 1 << 19  # bytes of a part, but for the last block of a tensor; what is smaller is in the version's own file
LEVELS = 4  # of the names by which small tensors belong together, such as run.learner.network.backbone
HASH = "[0-9a-f]{64}"


class MissingPart(ValueError):
    """A part that is listed is not there."""


def write_parts(folder: Path, classes: int, tensors: dict[str, Tensor]) -> list[str]:
    """Move the large ones of ``tensors`` to files in ``folder``, and return the names of these.

    ``classes``: their number, by which tensors with a row for each are known.
    """
    names = []
    for part in _divided(tensors, classes):
        content = serialised(part, {})
        name = hashlib.sha256(content).hexdigest()
        path = _path(folder, name)
        if not _has(path, content):
            write_atomically(path, content)
        names.append(name)
        for key in part:
            tensors.pop(_place_of(key)[1], None)
    return names


def _divided(tensors: dict[str, Tensor], classes: int) -> Iterator[dict[str, Tensor]]:
    """The parts: tensors by ``<first row>:<name>``."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in list(tensors.items()):
        if tensor.nbytes < SMALLEST:
            group = ".".join(name.split(".")[:LEVELS])
            groups[group][f"0:{name}"] = tensor
            continue
        rows = max(1, SMALLEST * len(tensor) // tensor.nbytes) if len(tensor) == classes else len(tensor)
        for start in range(0, len(tensor), rows):
            yield {f"{start}:{name}": tensor[start : start + rows]}
    for group in groups.values():
        if sum(tensor.nbytes for tensor in group.values()) >= SMALLEST:
            yield group


def _place_of(key: str) -> tuple[int, str]:
    """The first row and the name of a tensor in a part."""
    start, _, name = key.partition(":")
    return int(start), name


def _has(path: Path, content: bytes) -> bool:
    """Whether a file has this ``content``; a damaged one is written again."""
    try:
        return read_file(path) == content
    except OSError:
        return False


def read_parts(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors that :func:`write_parts` moved to the files with these ``names``.

    Raises ``ValueError`` if one is missing (:class:`MissingPart`), damaged or not a part.
    """
    blocks: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for part in names:
        for key, tensor in _tensors_in(folder, part).items():
            start, name = _place_of(key)
            blocks[name].append((start, tensor))
    tensors = {}
    for name, rows in blocks.items():
        rows.sort(key=lambda block: block[0])
        tensors[name] = rows[0][1] if len(rows) == 1 else torch.cat([tensor for _, tensor in rows])
    return tensors


def _tensors_in(folder: Path, name: str) -> dict[str, Tensor]:
    if not re.fullmatch(HASH, name):
        raise ValueError("its parts are not named by hashes")
    path = _path(folder, name)
    place = path.relative_to(folder)
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise MissingPart(f"its part {place} is missing") from None
    except OSError as error:
        raise ValueError(f"its part {place} cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != name:
        raise ValueError(f"its part {place} is damaged")
    return safetensors.torch.load(content)


def size_of(folder: Path, names: Collection[str]) -> int:
    """Bytes of the parts with these ``names``."""
    sizes = []
    for name in names:
        with contextlib.suppress(OSError):  # one that is missing, as the reader of the version will say
            sizes.append(_path(folder, name).stat().st_size)
    return sum(sizes)


def remove_others(folder: Path, keep: Collection[str]) -> None:
    """Remove the parts that are not among the names to ``keep``, and those of a save that did not end."""
    parts = folder / FOLDER
    if not parts.is_dir():
        return
    for path in list(parts.iterdir()):
        is_part = re.fullmatch(rf"{HASH}\.safetensors", path.name) and path.stem not in keep
        if is_part or re.fullmatch(rf"\.{HASH}\.safetensors\.partial", path.name):
            path.unlink()
    with contextlib.suppress(OSError):  # it has other files
        parts.rmdir()


def _path(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"
