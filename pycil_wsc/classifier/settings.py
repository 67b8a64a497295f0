"""The configuration of a :class:`pycil_wsc.Learner`: keys as Python values, and those that the first task fixes."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import numpy as np

from pycil_wsc import registry
from pycil_wsc.config.completion import complete
from pycil_wsc.config.loading import flatten
from pycil_wsc.config.options import BACKBONE_OPTION, KEYS, Config
from pycil_wsc.data.images.datasets import path_of
from pycil_wsc.devices import out_of_memory
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.files import absolute
from pycil_wsc.keys import having, plain

# later tasks' key -> first task's key, which has the same value unless given
FIRST = {key.like: name for name, key in KEYS.items() if key.like}
OF_EXPERIMENTS = frozenset(having(KEYS, only="experiments"))
# keys that the first task fixes: of the images, the network and its own schedule
FIXED = frozenset([*having(KEYS, decides="data"), *having(KEYS, fixed=True), *FIRST.values()])


def of_learner(keys: Mapping[str, object]) -> dict[str, object]:
    """The keys as in JSON; raises a :class:`UserError` for one of whole experiments."""
    given = flatten({name: from_python(value) for name, value in keys.items()})
    if wrong := sorted(OF_EXPERIMENTS & given.keys()):
        raise UserError(f"{wrong[0]}: is a key for experiments in JSON files only; leave it out")
    return given


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


def from_python(value: object) -> object:
    """``value`` as in JSON: numpy's numbers and arrays and paths, also within lists and mappings, are converted."""
    if isinstance(value, Mapping):
        return {name: from_python(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [from_python(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def refuse_changes(saved: Config, given: Mapping[str, object]) -> None:
    """Raise a :class:`UserError` if a key that the first task has fixed is given with another value than ``saved``."""
    values = saved.to_dict()
    fixed = {name: KEYS[name].check(value) for name, value in given.items() if name in FIXED}
    fixed |= {name: value for name, value in given.items() if name.startswith(BACKBONE_OPTION)}
    for name, value in plain(fixed).items():
        if name not in values or value != values[name]:
            raise UserError(f"{name}: was fixed by the first task; leave it out, or start a new learner")


def saved_values(saved: Config, given: Mapping[str, object]) -> dict[str, object]:
    """The values of ``saved``, without those that followed from a key that is now ``given``."""
    values = saved.to_dict()
    following = {
        "epochs": {*having(KEYS, within="epochs"), *registry.learners[saved.model_name].epoch_keys[1:]},
        "optimizer": {name for defaults in registry.optimizer_defaults.values() for name in defaults},
        "memory_bytes": {"fixed_memory"},
    }
    names = set().union(*(following[name] for name in following.keys() & given.keys())) & values.keys() - FIXED
    derived = configured({name: value for name, value in values.items() if name not in names}, tasks=()).to_dict()
    return {name: value for name, value in values.items() if name not in names or value != derived[name]}


def configured(values: Mapping[str, object], tasks: tuple[str, ...]) -> Config:
    """The configuration with these values and ``tasks``, which are not checked: arrays have no path."""
    config = complete({k: v for k, v in values.items() if k != "tasks"})
    return dataclasses.replace(config, tasks=tasks)


def values_of(config: Config, tasks: Iterable[str]) -> dict[str, object]:
    """The configuration's values to save, of a learner of ``tasks``."""
    omitted = OF_EXPERIMENTS - {"model_name"}
    values: dict[str, object] = {name: value for name, value in config.to_dict().items() if name not in omitted}
    return values | {"tasks": list(tasks)}
