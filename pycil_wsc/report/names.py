"""Display names of methods, data sets and settings, without characters that terminals, pages or files cannot show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath

METHODS = {  # as their papers write them
    "zero_shot": "Zero-shot",
    "finetune": "Finetune",
    "replay": "Replay",
    "icarl": "iCaRL",
    "bic": "BiC",
    "wa": "WA",
    "der": "DER",
    "foster": "FOSTER",
    "memo": "MEMO",
    "joint": "Joint",
    "wsc": "WSC",
    "slerp": "SLERP",
    "avg_online": "Online averaging",
    "avg_offline": "Offline averaging",
    "task_arithmetic": "Task Arithmetic",
    "magmax": "MagMax",
}
DATASETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "imagenet100": "ImageNet-100", "digits": "Digits"}
LONGEST = 60  # characters of a name of the user's own

Patterns = Sequence[tuple[str, str]]  # (pattern as in a shell, name): the first that fits names a method or a data set


def clean(text: object) -> str:
    """``text`` on one line, with everything unprintable (control characters, lone surrogates) replaced by U+FFFD."""
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "\ufffd" for c in str(text))


def method_name(name: str, patterns: Patterns = ()) -> str:
    """``wsc`` -> ``WSC``, ``icarl+wsc`` -> ``iCaRL + WSC``; keys after the method's name stay.

    A pattern may name the whole, or the method alone.
    """
    method, space, keys = name.partition(" ")
    if (own := _fitting(name, patterns)) is not None:
        return own
    if (own := _fitting(method, patterns)) is not None:
        return own + space + clean(keys)
    return " + ".join(METHODS.get(part, clean(part)) for part in method.split("+")) + space + clean(keys)


def dataset_names(datasets: Iterable[str], patterns: Patterns = ()) -> dict[str, str]:
    """A different name for each data set: of a path no more than tells it from the others."""
    names = {dataset: _dataset_name(dataset, patterns, 1) for dataset in dict.fromkeys(datasets)}
    for parts in range(2, 20):
        same = [dataset for dataset, name in names.items() if list(names.values()).count(name) > 1]
        if not same:
            break
        names |= {dataset: _dataset_name(dataset, patterns, parts) for dataset in same}
    return names


def _dataset_name(dataset: str, patterns: Patterns, parts: int) -> str:
    if (own := _fitting(dataset, patterns)) is not None:
        return own
    kind, colon, path = dataset.partition(":")
    if kind not in ("npz", "folder") or not colon:
        return DATASETS.get(dataset, clean(dataset)[:LONGEST])
    last = PurePath(path).parts[-parts:]
    name = "/".join(last)
    return clean(name.removesuffix(".npz") if kind == "npz" else name)[-LONGEST:] or kind


def _fitting(name: str, patterns: Patterns) -> str | None:
    return next((clean(own) for pattern, own in patterns if name == pattern or fnmatchcase(name, pattern)), None)
