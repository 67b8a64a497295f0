"""Configuration keys. Each is declared once, as a field of a frozen dataclass::

    @dataclass(frozen=True)
    class Options:
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")

The declaration holds the key's type, default, documentation, limits and roles. Other code asks for the keys of a role
(:func:`having`) or of a group (:func:`declared`): a list of their names elsewhere would be a second declaration.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pycil_wsc.errors import UserError, list_hint, shown
from pycil_wsc.files import Json

DECIDES = {  # what a key may decide
    "result": "the result, from the first task on",
    "data": "the tasks' classes and samples, and how those are augmented",
    "later tasks": "the result, but nothing of the first task",
    "rounding": "how the numbers are computed: other values change the result by rounding only",
    "speed": "how fast the result is computed",
    "name": "the name of an experiment",
    "files": "where files are, and what is written in addition to the result; not in result.json",
}
RESULT = {"result", "data", "later tasks"}
FIRST_TASK = {"result", "rounding"}  # bit for bit, apart from its data
RECORDED = DECIDES.keys() - {"files"}
ROLES = {  # their values
    "decides": tuple(DECIDES),
    "affects": ("time", "accuracy"),
    "names": ("", "folder"),
    "identifies": ("", "method", "memory", "seed"),
    "only": ("", "experiments"),
}
SAME: Json = object()  # the same as the default
V = TypeVar("V")
Type = type | types.UnionType | types.GenericAlias | None  # the type of a key; None: not checked
LARGEST_INTEGER, LARGEST_NUMBER = 10**18 - 1, 3.4e38  # what a result and tensors can hold


def key(default: Json, doc: str, **declared: Json) -> Any:
    """Declare a dataclass field as a configuration key, with a phrase of documentation.

    ``declared``: its limits and roles, which are the attributes of :class:`Key`.
    """
    metadata = {"decides": "result", **declared}
    Key("", None, default, doc, **metadata)  # raises an exception for what is not a limit or role
    return field(default=default, metadata={"doc": doc, **metadata})


def again(cls: type, name: str, default: Json = SAME, **changes: Json) -> Any:
    """Declare the key ``name`` of ``cls`` for another kind of run, with another default, documentation or roles."""
    (first,) = (option for option in fields(cls) if option.name == name)
    return field(default=first.default if default is SAME else default, metadata={**first.metadata, **changes})


def without_empty_groups(flat: Mapping[str, V], known: Iterable[str]) -> dict[str, V]:
    """``flat`` without the groups of the ``known`` keys, as ``wsc`` of ``wsc.retain``, whose value is {}."""
    if {} not in flat.values():
        return dict(flat)
    groups = {name.partition(".")[0] for name in known if "." in name}
    return {name: value for name, value in flat.items() if value != {} or name not in groups}


@dataclass(frozen=True)
class NoOptions:
    """The options of a learner without keys of its own."""


@dataclass(frozen=True)
class Key:
    """A declared key: its name in the JSON, its type, the value if it is absent, and what :func:`key` declared.

    Attributes:
        low: the smallest value, for each item of a list; null is always allowed, here and by the other limits.
        high: the largest value.
        above: values must be larger.
        below: values must be smaller.
        choices: the only allowed values.
        decides: one of :data:`DECIDES`.
        affects: ``"time"``, or ``"accuracy"`` if a step takes equally long with any value.
        names: ``"folder"`` if the value stands in the name of the run's folder, and is then not part of its hash.
        identifies: the field of a result's identity that the value is part of: ``"method"``, ``"memory"``, ``"seed"``.
        restricts: whether the key restricts a run to a part of its data, for trials.
        only: ``"experiments"`` if the key splits an experiment into tasks, names it or stores it: a
            :class:`pycil_wsc.Learner`, which is given its tasks, does not have it.
        fixed: whether the first task fixes the value, so that a saved learner cannot change it.
        by_method: whether methods choose the value for themselves, so that runs of two methods that differ in it may be
            compared.
        compared: of a language model's run: whether runs must agree in the value to be compared, whatever their
            methods, which choose all other keys for themselves.
        like: of a key of the first task: the key of later tasks that corresponds to it.
        within: of epochs of a schedule: the key that holds its length, by which they are scaled.
        instead: the key whose presence replaces this one.
        read_by: the methods that read the key; empty: all.
        before: the value that applied before the key was added, if it differs from the default; a comment says why.
        sets_defaults: whether the defaults of other keys depend on the value.
        studied: of keys that the paper's studies vary: the place, from 1, that names of runs give it among these.
    """

    name: str
    type: Type
    default: Json
    doc: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Sequence[Json] = ()
    decides: str = "result"
    affects: str = "time"
    names: str = ""
    identifies: str = ""
    restricts: bool = False
    only: str = ""
    fixed: bool = False
    by_method: bool = False
    compared: bool = False
    like: str = ""
    within: str = ""
    instead: str = ""
    read_by: Sequence[str] = ()
    before: Json = SAME
    sets_defaults: bool = False
    studied: int = 0

    def __post_init__(self) -> None:
        for role, known in ROLES.items():
            if getattr(self, role) not in known:
                raise ValueError(f"{role}={getattr(self, role)!r} is not one of {', '.join(map(repr, known))}")

    @property
    def earlier(self) -> Json:
        """The value that applied in versions without the key."""
        return self.default if self.before is SAME else self.before

    @property
    def takes_list(self) -> bool:
        """Whether one value is itself a list."""
        return any(typing.get_origin(option) is tuple for option in _options(self.type))

    def check(self, value: Json) -> Json:
        """Return ``value`` converted to the key's type; raise a :class:`UserError` if it is not valid."""
        value = _typed(self.name, value, self.type)
        for item in value if isinstance(value, tuple) else [value]:
            if problem := self._problem(item):
                raise UserError(f"{self.name}: {problem}")
        return value

    def _problem(self, item: Json) -> str:
        if self.choices and item not in self.choices:
            return f"'{shown(item)}' is not one of {', '.join(map(shown, self.choices))}"
        if isinstance(item, (str, bool)) or item is None:
            return ""
        if self.low is not None and item < self.low:
            return f"{item} is below {self.low}"
        if self.high is not None and item > self.high:
            return f"{item} is above {self.high}"
        if self.above is not None and item <= self.above:
            return f"{item} is not above {self.above}"
        if self.below is not None and item >= self.below:
            return f"{item} is not below {self.below}"
        return ""


@functools.cache
def declared(cls: type, prefix: str = "", decides: str = "result") -> Mapping[str, Key]:
    """The keys that the dataclass ``cls`` declares, by their names in the JSON: ``prefix`` and the field's name.

    ``decides``: of fields that do not say it, such as those of the consolidation, which knows nothing of keys.
    """
    hints = typing.get_type_hints(cls)
    return types.MappingProxyType(
        {
            prefix + f.name: Key(prefix + f.name, hints[f.name], f.default, **{"decides": decides, **f.metadata})
            for f in fields(cls)
            if f.metadata
        }
    )


def having(keys: Mapping[str, Key], **roles: Json) -> list[str]:
    """The names of the ``keys`` that have all these roles: ``having(KEYS, names="folder")``."""
    return [name for name, key in keys.items() if all(getattr(key, role) == value for role, value in roles.items())]


def select(values: Mapping[str, V], keys: Mapping[str, Key], decisions: Container[str]) -> dict[str, V]:
    """The ``values`` whose keys decide one of ``decisions``."""
    return {name: value for name, value in values.items() if keys[name].decides in decisions}


def up_to_date(identity: Mapping[str, Json], current: Mapping[str, Json], keys: Mapping[str, Key]) -> dict[str, Json]:
    """A recorded ``identity``, completed by the ``current`` keys that were added since, with their earlier values."""
    return {**plain({name: keys[name].earlier for name in current.keys() - identity.keys()}), **identity}


def plain(values: Mapping[str, Json]) -> dict[str, Json]:
    """``values`` with tuples converted to lists, as in JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def digest(identity: Mapping[str, Json], default: Mapping[str, Json]) -> str:
    """``-<hash>`` of the values that differ from ``default``, or an empty string if none does."""
    changed = {name: value for name, value in identity.items() if value != default.get(name)}
    return "-" + hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8] if changed else ""


def _options(wanted: Type) -> tuple[Type, ...]:
    return typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)


def _typed(name: str, value: Json, wanted: Type) -> Json:
    """Convert ``value`` to the type ``wanted``: a list to a tuple, an integer to a float where a number is expected."""
    for option in _options(wanted):
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_typed(name, item, typing.get_args(option)[0]) for item in value)
        if option is float and type(value) in (int, float):
            if abs(value) <= LARGEST_NUMBER:
                return float(value)
        elif type(value) is option and (option is not int or abs(value) <= LARGEST_INTEGER):
            return value
    if type(value) in (int, float) and LARGEST_INTEGER < abs(value) < math.inf:
        raise UserError(f"{name}: {shown(value)} is too large")
    raise UserError(f"{name}: expected {_described(wanted)}, got {shown(value, quotes=True)}{_hint(value, wanted)}")


def _hint(value: Json, wanted: Type) -> str:
    """What may be meant by a string with a comma: a number, or several values."""
    if not isinstance(value, str) or "," not in value:
        return ""
    if float in _options(wanted) and re.fullmatch(r"-?\d+,\d+", value):
        values = ", ".join(str(int(part)) for part in value.split(","))
        return f"; write a decimal point: {value.replace(',', '.')}; two values are a list: [{values}]"
    return list_hint(value)


def _described(wanted: Type) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}

    def plural(items):
        return " or ".join(names[item].removeprefix("a ") + "s" for item in _options(items))

    return " or ".join(
        f"a list of {plural(typing.get_args(option)[0])}" if typing.get_origin(option) else names[option]
        for option in _options(wanted)
    )
