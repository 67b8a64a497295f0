"""The image files of exemplars: their hashes, and the copies of them in the folder of a saved learner."""

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pycil_wsc import registry
from pycil_wsc.data.images.files import decode
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file, write_atomically
from pycil_wsc.methods.closed_form.closed_form import ClosedForm

COPIES = "exemplars"


def name_of(path: str, folder: Path, sha256: str | None, copy: bool) -> str:
    """The name by which ``folder`` refers to the image file ``path``: within the folder, or an absolute path.

    The path may come from a learner that somebody else has saved, who could name any file of this machine. So a file is
    copied only if its content is known to him already, by its hash, and if it is an image.
    """
    if is_inside(path, folder):
        return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    copied_before = _hash_in_name(path)
    if not copy and not copied_before:
        return os.path.abspath(path)
    known = sha256 or copied_before
    if not known:
        raise UserError(
            f"{path}: is not copied, as the saved learner that names it has no hash of it; learn this image again, or "
            "save without copy_images"
        )
    content = _content(path)
    found = _sha256(content)
    if not found.startswith(known):
        raise UserError(f"{path}: is another image than the one that was learned; restore the exemplar's file")
    name = f"{COPIES}/{found[:32]}{Path(path).suffix}"
    if not _is_copy(folder / name):
        decode(path)
        write_atomically(folder / name, content)
    return name


def is_inside(path: str, folder: Path) -> bool:
    """Whether the file ``path`` is below ``folder``, wherever links lead."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return not inside.startswith(os.pardir)


def remove_copies(folder: Path, keep: Collection[str]) -> None:
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
    return bool(named) and path.is_file() and _sha256(read_file(path))[:32] == path.stem


def _hash_in_name(path: str) -> str:
    """The first 32 digits of the SHA-256 of a copy in another saved learner's folder; "" of another file.

    That learner may remove its copies when it is saved again.
    """
    name = Path(path)
    is_named_so = name.parent.name == COPIES and re.fullmatch(r"[0-9a-f]{32}", name.stem)
    return name.stem if is_named_so else ""


def _is_unfinished_copy(path: Path) -> bool:
    return bool(re.fullmatch(r"\.[0-9a-f]{32}(\.\w+)?\.partial", path.name))


def hashes_of(splits: Iterable[Split], known: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of each image file: the ``known`` one, or that of its present content."""
    return {path: known.get(path) or file_hash(path) for path in _files(splits)}


def known_hashes_of(splits: Iterable[Split], known: Mapping[str, str]) -> dict[str, str]:
    """The ``known`` SHA-256 of each image file that has one.

    The others are named by a learner of an earlier version, which noted no hashes, or by one that claims to be: their
    present content does not prove what was learned.
    """
    return {path: known[path] for path in _files(splits) if path in known}


def digests_of(split: Split, known: Mapping[str, str]) -> np.ndarray:
    """The first 8 bytes of the SHA-256 of each image, of its pixels or of its file: int64 (N,).

    ``known``: the SHA-256 of files, which are then not read.
    """
    if split.in_memory:
        return as_digests([pixel_hash(image) for image in split.images])
    of_files = hashes_of((split,), known)
    return as_digests([of_files[path] for path in split.images.tolist()])


def as_digests(hashes: Iterable[str]) -> np.ndarray:
    """The first 8 bytes of each SHA-256: int64 (N,)."""
    return np.array([int(each[:16], 16) for each in hashes], np.uint64).view(np.int64)


def pixel_hash(image: np.ndarray) -> str:
    """The SHA-256 of an image's pixels."""
    return _sha256(image.tobytes())


def file_hash(path: str) -> str:
    """The SHA-256 of a file's content."""
    return _sha256(_content(path))


def with_classes(digests: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The ``digests`` of images, each mixed with the name of its class: int64 (N,)."""
    of_names = as_digests([_sha256(name.encode(errors="surrogatepass")) for name in names])
    return digests ^ of_names[labels]


def learns_once(method: str) -> bool:
    """Whether the ``method`` adds each image to sums, so that an image that comes again would count twice."""
    return issubclass(registry.learners[method], ClosedForm)


def takes_out(method: str) -> bool:
    """Whether the ``method`` can take an image out of its sums again."""
    learner = registry.learners[method]
    return issubclass(learner, ClosedForm) and learner.takes_out


def check_exemplars(splits: Iterable[Split], hashes: Mapping[str, str]) -> None:
    """Raise a :class:`UserError` that names the first image file that is gone or has another content now."""
    paths = _files(splits)
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise UserError(
            f"{missing[0]}: no longer exists, one of {len(missing)} missing files of exemplars; restore them, or "
            "load the learner from a folder in which it was saved with copy_images=True"
        )
    for path in paths:
        if path in hashes and file_hash(path) != hashes[path]:
            raise UserError(f"{path}: is another image than the exemplar that was learned; restore the exemplar's file")


def _files(splits: Iterable[Split]) -> list[str]:
    return [path for split in splits if not split.in_memory for path in split.images.tolist()]


def _content(path: str) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make the image readable, or restore it") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
