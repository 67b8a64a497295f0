"""Keys of a configuration: what each may be, and one clear line where a value is wrong."""

import hashlib
import json
import math
import types
import typing
from dataclasses import field

from pycil_wsc.errors import UserError

# Keys that change no result.
PLACES = {
    "prefix",
    "device",
    "cuda_graph",
    "num_workers",
    "threads",
    "cache_first_task",
    "checkpoint_seconds",
    "data_root",
    "out",
    "save_weights",
    "tensorboard",
    "analyse",
}


def key(default, doc, low=None, high=None, choices=None):
    """A field with its documentation and the values it may have."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


def takes_list(kind):
    """Whether a value of the type ``kind`` is a list."""
    return "tuple" in str(kind)


def digest(identity, usual):
    """``-<hash>`` of what differs from the usual, or nothing."""
    other = {name: value for name, value in identity.items() if value != usual.get(name)}
    return "-" + hashlib.sha256(json.dumps(other, sort_keys=True).encode()).hexdigest()[:8] if other else ""


def checked(name, value, kind, limits):
    """``value`` with the type ``kind`` and within the ``limits`` that :func:`key` was given, or a :class:`UserError`."""
    value = typed(name, value, kind)
    for number in value if isinstance(value, tuple) else [value]:
        if number is None:
            continue
        if limits["choices"] and number not in limits["choices"]:
            raise UserError(f"{name}: '{number}' is not one of {', '.join(map(_shown, limits['choices']))}")
        if limits["low"] is not None and number < limits["low"]:
            raise UserError(f"{name}: {number} is below {limits['low']}")
        if limits["high"] is not None and number > limits["high"]:
            raise UserError(f"{name}: {number} is above {limits['high']}")
    return value


def typed(name, value, kind):
    for option in typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind]:
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(typed(name, item, typing.get_args(option)[0]) for item in value)
        if option is float and type(value) in (int, float):
            if math.isfinite(value):
                return float(value)
        elif type(value) is option:
            return value
    raise UserError(f"{name}: expected {_described(kind)}, got {json.dumps(value, default=str)}")


def _described(kind):
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind]
    return " or ".join(
        "a list of " + names[typing.get_args(p)[0]].removeprefix("a ") + "s" if typing.get_origin(p) else names[p]
        for p in parts
    )


def _shown(choice):
    return choice if isinstance(choice, str) else json.dumps(choice)
