"""Labels of any type, as scikit-learn has them, and the names of their classes in a learner."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from pycil_wsc.data.types import normal
from pycil_wsc.errors import UserError

TYPES = {"b": "booleans", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "U": "strings"}  # by kind


def name_of(label: np.generic) -> str:
    """The name of a label's class."""
    return normal(str(label.item()))


def labels_by_name(labels: np.ndarray) -> dict[str, np.generic]:
    """{name of the class: label}"""
    return {name_of(label): label for label in labels}


def labels_of(names: Sequence[str], known: Mapping[str, np.generic]) -> np.ndarray:
    """The label of each class, by its name; of a class that is not ``known`` it is the name in the type of the others.

    A learner has such a class if it was trained by itself.
    """
    dtype = np.array([*known.values()]).dtype
    labels = [known[name] if name in known else _read(name, dtype) for name in names]
    return np.array(labels)


def _read(name: str, dtype: np.dtype) -> np.generic:
    if dtype.kind == "b" and name in ("True", "False"):
        return np.bool_(name == "True")
    with contextlib.suppress(ValueError):
        label = np.array([name]).astype(str if dtype.kind == "U" else dtype)[0]
        if name_of(label) == name:
            return label
    raise UserError(f"the class '{name}' is no label, as the others are {TYPES[dtype.kind]}; rename it to one")


def labels_and_otherwise(labels: np.ndarray, otherwise: str | float | None) -> np.ndarray:
    """``labels``, and then what is predicted for an image with none of them: by default "unknown", or -1.

    Raises a :class:`UserError` if ``otherwise`` is one of them, of another type, or changes one in a common array.
    """
    if otherwise is None:
        otherwise = "unknown" if labels.dtype.kind == "U" else -1
    if isinstance(otherwise, str) != (labels.dtype.kind == "U"):
        raise UserError(
            f"otherwise: {otherwise!r} is of another type than the labels, which are {TYPES[labels.dtype.kind]}"
        )
    if otherwise in labels.tolist():
        raise UserError(f"otherwise: {otherwise!r} is a label; give another value")
    given = [*labels.tolist(), otherwise]
    both = np.array(given)
    _check_same("otherwise", given, both)
    is_float = labels.dtype.kind == "f"
    return both.astype(np.result_type(labels.dtype, np.min_scalar_type(otherwise))) if is_float else both


def plain_labels(given: ArrayLike, labels: np.ndarray) -> np.ndarray:
    """``labels``, an array made of those that were ``given``, as booleans, numbers or strings.

    Raises a :class:`UserError` if they are of other types or of several, or if NumPy has changed one.
    """
    if labels.dtype.kind == "O":
        if len({isinstance(label, str) for label in labels.tolist()}) > 1:
            raise UserError("y: some labels are strings, and others are not; give labels of one type")
        labels = np.array(labels.tolist())
    if labels.dtype.kind not in TYPES:
        raise UserError(f"y: labels of the type {labels.dtype}; give whole numbers or strings")
    _check_same("y", given, labels)
    return labels + 0.0 if labels.dtype.kind == "f" else labels  # -0.0 is 0.0


def consistent_labels(labels: np.ndarray, known: np.ndarray, allowed: ArrayLike | None) -> np.ndarray:
    """``labels`` as the ``known`` ones: whole numbers in a type that holds both, strings in the same Unicode form.

    Raises a :class:`UserError` if they are of another type than the known ones, or not among the ``allowed`` ones.
    """
    labels = _spelled_alike(_in_common(labels, known.dtype), known)
    new, old = TYPES[labels.dtype.kind], TYPES[known.dtype.kind]
    if new != old:
        raise UserError(f"y: the labels are {new}, and earlier ones were {old}; give labels of one type")
    if allowed is None:
        return labels
    permitted = np.ravel(allowed)
    _check_same("classes", allowed, permitted)
    permitted = _spelled_alike(permitted, labels)
    others = sorted(set(labels.tolist()) - set(permitted.tolist()))
    if others:
        raise UserError(f"classes: {others[0]!r} is in y, but not in classes; add it, or leave out classes")
    return labels


def _in_common(labels: np.ndarray, known: np.dtype) -> np.ndarray:
    """Whole numbers in the type of the known ones, where NumPy's common type of both is not exact."""
    if labels.dtype.kind not in "iu" or known.kind not in "iu" or np.result_type(labels, known).kind != "f":
        return labels
    converted = labels.astype(known)
    wrong = labels[converted != labels]
    if len(wrong):
        raise UserError(f"y: {wrong[0]} is too large for the type of the known labels, {known}")
    return converted


def _spelled_alike(labels: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Strings that are one name in other Unicode forms as the first of them, a known one if any; others as they are."""
    if labels.dtype.kind != "U" or known.dtype.kind != "U" and len(known):
        return labels
    forms: dict[str, str] = {}
    for label in [*known.tolist(), *labels.tolist()]:
        forms.setdefault(normal(str(label)), label)
    return np.array([forms[normal(label)] for label in labels.tolist()])


def _check_same(name: str, given: ArrayLike, labels: np.ndarray) -> None:
    """Raise a :class:`UserError` if the array ``labels`` has other ones than those ``given``, of which NumPy made it.

    It makes "1" of 1 beside a string, 1 of True beside a number, and "a" of "a\\0", and rounds large whole numbers.
    """
    pairs = zip(np.asarray(given, object).ravel().tolist(), labels.ravel().tolist(), strict=True)
    for label, made in pairs:
        is_number = label == label  # but not nan, which is refused elsewhere
        is_truth = isinstance(label, (bool, np.bool_))
        if is_number and label != made or is_truth != isinstance(made, bool):
            raise UserError(
                f"{name}: {label!r} would become {made!r} in NumPy's array; give labels of one type, and strings that "
                "do not end in a zero byte"
            )
