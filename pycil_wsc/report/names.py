"""Names: of methods and data sets as displayed, and of runs by the keys that distinguish them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from pycil_wsc.results import Record
from pycil_wsc.results.identity import LEADING, OF_FIRST_TASK


def data_file(name: str) -> Any:
    """The contents of a JSON file of this package."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


METHODS = data_file("methods.json")["methods"]
RANKS = {method: place for place, method in enumerate(METHODS)}
DATASETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "imagenet100": "ImageNet-100", "digits": "Digits"}
LONGEST = 60  # longest name of a user's data set, in characters
STUDIED: dict[str, bool | float | str] = {  # the keys of the paper's studies with the values of the paper's method
    "wsc.importance": "moment",
    "wsc.reset": "blend",
    "wsc.reset_every": "once",
    "wsc.average": True,
    "wsc.retain": 0.2,
    "exemplars": "herding",
}
Patterns = Sequence[tuple[str, str]]  # (shell pattern, name) of methods or data sets; the first match is used


def clean(text: object) -> str:
    """``text`` on one line, with unprintable characters (control characters, lone surrogates) replaced by U+FFFD."""
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "\ufffd" for c in str(text))


# ---- methods and data sets -------------------------------------------------------------------------------------------


def method_name(name: str, patterns: Patterns = ()) -> str:
    """``wsc`` -> ``WSC``, ``icarl+wsc`` -> ``iCaRL + WSC``; keys after the method's name are kept.

    A pattern may match the whole name, or only the method.
    """
    method, space, keys = name.partition(" ")
    whole, own = _matching(name, patterns), _matching(method, patterns)
    if whole is not None:
        return whole
    if own is None:
        own = " + ".join(METHODS[part]["name"] if part in METHODS else clean(part) for part in method.split("+"))
    return own + space + clean(keys)


def method_rank(method: str) -> tuple[int, bool, str]:
    """A sort key for the order of ``METHODS``; consolidated ones follow their base, unknown ones the others."""
    base = method.removesuffix("+wsc")
    return RANKS.get(base, len(RANKS)), method != base, method


def dataset_names(datasets: Iterable[str], patterns: Patterns = ()) -> dict[str, str]:
    """A distinct name for each data set; a path is shortened as far as it remains distinct."""
    names = {dataset: _dataset_name(dataset, patterns, 1) for dataset in dict.fromkeys(datasets)}
    for parts in range(2, 20):
        taken = list(names.values())
        same = [dataset for dataset, name in names.items() if taken.count(name) > 1]
        names |= {dataset: _dataset_name(dataset, patterns, parts) for dataset in same}
    return names


def _dataset_name(dataset: str, patterns: Patterns, parts: int) -> str:
    own = _matching(dataset, patterns)
    if own is not None:
        return own
    kind, colon, path = dataset.partition(":")
    if kind not in ("npz", "folder") or not colon:
        return DATASETS.get(dataset, clean(dataset)[:LONGEST])
    name = "/".join(PurePath(path).parts[-parts:])
    return clean(name.removesuffix(".npz") if kind == "npz" else name)[-LONGEST:] or kind


def _matching(name: str, patterns: Patterns) -> str | None:
    return next((clean(own) for pattern, own in patterns if name == pattern or fnmatchcase(name, pattern)), None)


# ---- runs ------------------------------------------------------------------------------------------------------------


def studied_value(record: Record, name: str) -> bool | float | str:
    """The value of a studied key. Random exemplars count as the paper's value: its studies do not vary this."""
    value = record.config.get(name)
    if value is None or (name, value) == ("exemplars", "random"):
        return STUDIED[name]
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def changed_keys(record: Record) -> set[str]:
    """The studied keys in which ``record`` differs from the paper's method."""
    return {name for name, value in STUDIED.items() if studied_value(record, name) != value}


def distinguishing_keys(variants: Sequence[Mapping[str, object]], skipped: Iterable[str] = ()) -> list[str]:
    """The keys that distinguish the variants, chosen greedily :func:`in_order`."""
    keys: list[str] = []
    parts: list[tuple[str, ...]] = [()] * len(variants)
    for name in in_order({name for variant in variants for name in variant} - set(skipped)):
        finer = [(*part, json.dumps(variant.get(name))) for part, variant in zip(parts, variants)]
        if len(set(finer)) > len(set(parts)):
            keys, parts = [*keys, name], finer
    return keys


def in_order(names: Iterable[str]) -> list[str]:
    """Keys in the order in which names of runs have them, whichever order their configurations have.

    Keys on which values of other keys depend come first, so that runs with two optimisers, each with its own learning
    rates, are told apart by the optimiser too. Then come the keys of the paper's studies, those of the first task, and
    all others, each by name.
    """
    first = [*LEADING, *STUDIED, *OF_FIRST_TASK]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name))


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
