"""Names of very many image files, in few bytes each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

BLOCK = 10_000  # names that are strings at the same time
SPECIAL = ("", ".", "..")  # last parts that do not name a file in the folder before them


class Paths:
    """Names of files, like an array of str, (N,), but read-only: each folder is held once, and a name as bytes.

    A million names take some 30 MB, of which an array has 4 bytes for each letter of the longest path. What an array
    is asked for, and :class:`Paths` cannot do, numpy does with an array of str.

    Args:
        folders: beginnings of names, up to and with the last slash.
        places: int32 (N,), the folder of each file.
        names: bytes (N,), the rest of each name, in UTF-8.
    """

    ndim = 1
    dtype = np.dtype(str)

    def __init__(self, folders: Sequence[str], places: np.ndarray, names: np.ndarray) -> None:
        self.folders = folders
        self.places = places
        self.names = names

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: Any) -> Any:
        places, names = self.places[rows], self.names[rows]
        if isinstance(names, bytes):
            return self.folders[int(places)] + _text(names)
        return Paths(self.folders, places, names)

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), BLOCK):
            rows = slice(start, start + BLOCK)
            pairs: Iterable[tuple[int, bytes]] = zip(self.places[rows].tolist(), self.names[rows].tolist(), strict=True)
            for place, name in pairs:
                yield self.folders[place] + _text(name)

    def __eq__(self, other: object) -> Any:  # one by one
        return np.asarray(self) == np.asarray(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != np.asarray(other)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.tolist(), dtype=str if dtype is None else dtype)

    def tolist(self) -> list[str]:
        return list(self)

    def used(self) -> list[str]:
        """The folders that have files, each with its slash."""
        places: list[int] = np.unique(self.places).tolist()
        return [self.folders[place] for place in places]


def compact(paths: Iterable[str]) -> np.ndarray:
    """:class:`Paths` of these names, as the array that they stand for."""
    return cast(np.ndarray, _of(paths))


def names_in(images: np.ndarray) -> Sequence[str]:
    """The names in an array of paths."""
    return cast(Sequence[str], images) if isinstance(images, Paths) else images.tolist()


def renamed(images: np.ndarray, change: Callable[[str], str]) -> np.ndarray:
    """An array of paths by other names: ``change`` of each, which must change the folders of files alone."""
    paths = images if isinstance(images, Paths) else _of(images.tolist())
    if np.isin(paths.names, [name.encode() for name in SPECIAL]).any():
        return compact(map(change, paths))
    return cast(np.ndarray, Paths([change(f"{folder}x")[:-1] for folder in paths.folders], paths.places, paths.names))


def folders_in(images: np.ndarray) -> Iterable[str]:
    """Names of files in all folders that an array of paths names; of one path, this path."""
    if isinstance(images, Paths) and len(images) > 1:
        return [folder + name for folder in images.used() for name in ("x", "y")]
    return names_in(images)


def concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """``np.concatenate`` of images, of which some may be :class:`Paths`."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, Paths) for part in parts):
        return np.concatenate(parts)
    all_paths = [part if isinstance(part, Paths) else _of(part.tolist()) for part in parts]
    number: dict[str, int] = {}
    places = []
    for paths in all_paths:
        numbers = np.zeros(len(paths.folders), np.int32)
        numbers[np.unique(paths.places)] = [number.setdefault(folder, len(number)) for folder in paths.used()]
        places.append(numbers[paths.places])
    joined = Paths(list(number), np.concatenate(places), np.concatenate([paths.names for paths in all_paths]))
    return cast(np.ndarray, joined)


def _of(paths: Iterable[str]) -> Paths:
    number: dict[str, int] = {}
    places: list[np.ndarray] = []
    names: list[np.ndarray] = []
    block: list[tuple[int, bytes]] = []

    def end_block() -> None:
        of_block = np.array([place for place, _ in block], np.int32)
        places.append(of_block)
        names.append(np.array([name for _, name in block], bytes))
        block.clear()

    for path in paths:
        folder, slash, name = path.rpartition("/")
        place = number.setdefault(folder + slash, len(number))
        block.append((place, name.encode(errors="surrogatepass")))
        if len(block) == BLOCK:
            end_block()
    end_block()
    return Paths(list(number), np.concatenate(places), np.concatenate(names))


def _text(name: bytes) -> str:
    return name.decode(errors="surrogatepass")
