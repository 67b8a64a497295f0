"""The image files of exemplars, and the copies of them in the folder of a saved learner."""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pycil_wsc.classifier.store.hashes import content_of, file_hash, files_in, sha256_of
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file, write_atomically

COPIES = "exemplars"


def name_of(path: str, folder: Path, sha256: str, copy: bool) -> str:
    """The name by which ``folder`` refers to the image file ``path``: within the folder, or an absolute path.

    The path may come from a learner that somebody else has saved, who could name any file of this machine. So a file is
    copied only if its content is known to him already, by its hash, and if it is an image.
    """
    if is_inside(path, folder):
        return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    if not copy and not _is_copy_elsewhere(path):
        return os.path.abspath(path)
    content = content_of(path)
    digest = sha256_of(content)
    if digest != sha256:
        raise UserError(f"{path}: is another image than the one that was learned; restore the exemplar's file")
    name = f"{COPIES}/{digest[:32]}{Path(path).suffix}"
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
    return bool(named) and path.is_file() and sha256_of(read_file(path))[:32] == path.stem


def _is_copy_elsewhere(path: str) -> bool:
    """Whether a file is a copy in another saved learner's folder, which may remove it when it is saved again."""
    name = Path(path)
    return name.parent.name == COPIES and bool(re.fullmatch(r"[0-9a-f]{32}", name.stem))


def _is_unfinished_copy(path: Path) -> bool:
    return bool(re.fullmatch(r"\.[0-9a-f]{32}(\.\w+)?\.partial", path.name))


def check_exemplars(splits: Iterable[Split], hashes: Mapping[str, str]) -> None:
    """Raise a :class:`UserError` that names the first image file that is gone or has another content now."""
    paths = list(files_in(splits))
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise UserError(
            f"{missing[0]}: no longer exists, one of {len(missing)} missing files of exemplars; restore them, or "
            "load the learner from a folder in which it was saved with copy_images=True"
        )
    for path in paths:
        if file_hash(path) != hashes[path]:
            raise UserError(f"{path}: is another image than the exemplar that was learned; restore the exemplar's file")
