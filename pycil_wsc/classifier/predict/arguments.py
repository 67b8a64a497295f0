"""Arguments of callers as what they should be, and one line about what they are not."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import numpy as np

from pycil_wsc.data.images.datasets import path_of
from pycil_wsc.devices import out_of_memory
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.files import absolute


def folder_of(name: str, path: object) -> Path:
    """``path`` as the path of a folder; raises a :class:`UserError`, which begins with ``name``, if it cannot be one.

    It is absolute, so that it holds in whichever folder the process will be.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise UserError(f"{name}: {path!r} is not the name of a folder; give a string or a path")
    return absolute(path_of(name, text))


def whole_number(name: str, value: object) -> int:
    """``value``; raises a :class:`UserError` that begins with ``name`` if it is not a number of things."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise UserError(f"{name}: {value!r} is not a whole number; give one, or 0")
    return int(value)


def probability(name: str, value: object) -> float:
    """``value``; raises a :class:`UserError` that begins with ``name`` if it is not a number from 0 to 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise UserError(f"{name}: {value!r} is not a probability from 0 to 1")
    return value


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def from_python(value: object) -> object:
    """``value`` as in JSON: numpy's numbers and arrays and paths, also within lists and mappings, are converted."""
    if isinstance(value, Mapping):
        return {name: from_python(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [from_python(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@contextlib.contextmanager
def refusing(path: Path, what: str, remedy: str, named: bool = False) -> Iterator[None]:
    """A context that turns errors into a :class:`UserError`: ``path`` is not ``what`` it should be, and the ``remedy``.

    Damaged files, and those of other programs and versions, raise many kinds of errors. ``named``: a
    :class:`UserError` gets ``path`` in front.
    """
    try:
        yield
    except UserError as error:
        if not named:
            raise
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        if out_of_memory(error):
            raise UserError(f"{path}: there is not enough memory to load it ({reason})") from None
        raise UserError(f"{path}: is not {what} ({reason}); {remedy}") from None
