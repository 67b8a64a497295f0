"""A nested state as JSON values and tensors, for files that execute nothing when they are loaded."""

import math
from collections.abc import Callable
from typing import Any

import torch

# mark values that JSON lacks, such as {TENSOR: the tensor's name}
TENSOR, TUPLE, PAIRS, FLOAT = "$tensor", "$tuple", "$pairs", "$float"


def packed(value: Any, tensors: dict[str, torch.Tensor], place: str = "") -> Any:
    """Convert ``value`` to JSON values and move its tensors to ``tensors``, named by their places, such as
    ``network.fc.weight``.

    ``value``: tensors, numbers, strings, booleans and None, in dicts, lists and tuples, nested at will. Raises a
    TypeError for anything else.
    """
    if isinstance(value, torch.Tensor):
        name = place if place not in tensors else f"{place}#{len(tensors)}"  # {"a.b": ...} beside {"a": {"b": ...}}
        tensors[name] = value.detach().contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        inner = {key: packed(item, tensors, f"{place}.{key}".lstrip(".")) for key, item in value.items()}
        return inner if all(isinstance(key, str) for key in inner) else {PAIRS: [[k, v] for k, v in inner.items()]}
    if isinstance(value, (list, tuple)):
        items = [packed(item, tensors, f"{place}.{number}".lstrip(".")) for number, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{place}: a {type(value).__name__} cannot be saved; a state is tensors and JSON values")


def unpacked(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """What :func:`packed` converted, with ``tensor_of(name)`` for each tensor."""
    if isinstance(value, list):
        return [unpacked(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensor_of(value[TENSOR])
    if TUPLE in value:
        return tuple(unpacked(item, tensor_of) for item in value[TUPLE])
    if PAIRS in value:
        return {key: unpacked(item, tensor_of) for key, item in value[PAIRS]}
    if FLOAT in value:
        return float(value[FLOAT])
    return {key: unpacked(item, tensor_of) for key, item in value.items()}
