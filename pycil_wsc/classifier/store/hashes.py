"""What identifies an image: the SHA-256 of its file or of its pixels, and a digest of eight bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pycil_wsc.data.images.paths import names_in
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import read_file


class Hashes(Mapping[str, str]):
    """The SHA-256 of very many files by their names, in 48 bytes each: it can be asked for names, but has no list of
    them.

    Args:
        split: image files, or images in memory, of which there are none.
        known: the hashes of some, and of other files; the others are read.
    """

    def __init__(self, split: Split, known: Mapping[str, str]) -> None:
        self.known = known
        number = 0 if split.in_memory else len(split)
        names = np.empty(number, "S16")
        hashes = np.empty((number, 32), np.uint8)
        for row, path in enumerate(names_in(split.images) if number else ()):
            names[row] = _key(path)
            hashes[row] = np.frombuffer(bytes.fromhex(known.get(path) or file_hash(path)), np.uint8)
        self.digests = hashes[:, :8].copy().view(">u8").astype(np.uint64).view(np.int64).reshape(-1)  # of each image
        order = np.argsort(names, kind="stable")
        self._names, self._hashes = names[order], hashes[order]

    def __getitem__(self, path: str) -> str:
        key = _key(path)
        place = np.searchsorted(self._names, key)
        if place < len(self._names) and self._names[place] == key.rstrip(b"\0"):
            return self._hashes[place].tobytes().hex()
        return self.known[path]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("the names of the files are not kept")


def _key(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=16).digest()


def hashes_of(splits: Iterable[Split], known: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of each image file: the ``known`` one, or that of its present content."""
    return {path: known.get(path) or file_hash(path) for path in files_in(splits)}


def digests_of(split: Split, known: Mapping[str, str]) -> np.ndarray:
    """The first 8 bytes of the SHA-256 of each image, of its pixels or of its file: int64 (N,).

    ``known``: the SHA-256 of files, which are then not read.
    """
    if split.in_memory:
        return as_digests([pixel_hash(image) for image in split.images])
    return as_digests(known.get(path) or file_hash(path) for path in names_in(split.images))


def as_digests(hashes: Iterable[str]) -> np.ndarray:
    """The first 8 bytes of each SHA-256: int64 (N,)."""
    return np.fromiter((int(sha256[:16], 16) for sha256 in hashes), np.uint64).view(np.int64)


def pixel_hash(image: np.ndarray) -> str:
    """The SHA-256 of an image's pixels."""
    return sha256_of(image.tobytes())


def file_hash(path: str) -> str:
    """The SHA-256 of a file's content."""
    return sha256_of(content_of(path))


def with_classes(digests: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The ``digests`` of images, each mixed with the name of its class: int64 (N,)."""
    used, places = np.unique(labels, return_inverse=True)  # of a thousand names often one
    of_names = as_digests([sha256_of(names[int(label)].encode(errors="surrogatepass")) for label in used])
    return digests ^ of_names[places]


def files_in(splits: Iterable[Split]) -> Iterator[str]:
    for split in splits:
        if not split.in_memory:
            yield from names_in(split.images)


def content_of(path: str) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make the image readable, or restore it") from None


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
