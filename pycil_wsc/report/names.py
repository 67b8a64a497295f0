"""Display names of methods, data sets and settings, without characters that terminals, pages or files cannot show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath

METHODS = {  # as written in their papers
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
    "lwf": "LwF",
    "ewc": "EWC",
    "si": "SI",
    "mas": "MAS",
    "er_ace": "ER-ACE",
    "derpp": "DER++",
    "l2_init": "L2-init",
    "sam": "SAM",
    "ema": "EMA",
    "slerp": "SLERP",
    "avg_online": "Online averaging",
    "avg_offline": "Offline averaging",
    "task_arithmetic": "Task Arithmetic",
    "magmax": "MagMax",
}
DATASETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "imagenet100": "ImageNet-100", "digits": "Digits"}
LONGEST = 60  # longest name of a user's data set, in characters

Patterns = Sequence[tuple[str, str]]  # (shell pattern, name) of methods or data sets; the first match is used


def clean(text: object) -> str:
    """``text`` on one line, with unprintable characters (control characters, lone surrogates) replaced by U+FFFD."""
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "\ufffd" for c in str(text))


def method_name(name: str, patterns: Patterns = ()) -> str:
    """``wsc`` -> ``WSC``, ``icarl+wsc`` -> ``iCaRL + WSC``; keys after the method's name are kept.

    A pattern may match the whole name, or only the method.
    """
    method, space, keys = name.partition(" ")
    if (own := _matching(name, patterns)) is not None:
        return own
    if (own := _matching(method, patterns)) is not None:
        return own + space + clean(keys)
    return " + ".join(METHODS.get(part, clean(part)) for part in method.split("+")) + space + clean(keys)


def dataset_names(datasets: Iterable[str], patterns: Patterns = ()) -> dict[str, str]:
    """A distinct name for each data set; a path is shortened as far as it remains distinct."""
    names = {dataset: _dataset_name(dataset, patterns, 1) for dataset in dict.fromkeys(datasets)}
    for parts in range(2, 20):
        same = [dataset for dataset, name in names.items() if list(names.values()).count(name) > 1]
        if not same:
            break
        names |= {dataset: _dataset_name(dataset, patterns, parts) for dataset in same}
    return names


def _dataset_name(dataset: str, patterns: Patterns, parts: int) -> str:
    if (own := _matching(dataset, patterns)) is not None:
        return own
    kind, colon, path = dataset.partition(":")
    if kind not in ("npz", "folder") or not colon:
        return DATASETS.get(dataset, clean(dataset)[:LONGEST])
    last = PurePath(path).parts[-parts:]
    name = "/".join(last)
    return clean(name.removesuffix(".npz") if kind == "npz" else name)[-LONGEST:] or kind


def _matching(name: str, patterns: Patterns) -> str | None:
    return next((clean(own) for pattern, own in patterns if name == pattern or fnmatchcase(name, pattern)), None)
