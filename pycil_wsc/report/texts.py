"""How things are written: names of methods and data sets, the notes of ``texts.j2``, and what formats escape."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

import jinja2
from markupsafe import Markup

from pycil_wsc.errors import one_line, shown
from pycil_wsc.results.identity import without_consolidation


def data_file(name: str) -> Any:
    """The contents of a JSON file of this package."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


METHODS = data_file("methods.json")["methods"]
RANKS = {method: place for place, method in enumerate(METHODS)}
DATASETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "imagenet100": "ImageNet-100", "digits": "Digits"}
LONGEST = 60  # longest name of a user's data set, in characters
Patterns = Sequence[tuple[str, str]]  # (shell pattern, name) of methods or data sets; the first match is used


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def method_name(name: str, patterns: Patterns = ()) -> str:
    """``wsc`` -> ``WSC``, ``icarl+wsc`` -> ``iCaRL + WSC``; keys after the method's name are kept.

    A pattern may match the whole name, or only the method.
    """
    method, space, keys = name.partition(" ")
    whole = _matching(name, patterns)
    shown = _matching(method, patterns)
    if whole is not None:
        return whole
    if shown is None:
        shown = " + ".join(METHODS[part]["name"] if part in METHODS else one_line(part) for part in method.split("+"))
    return shown + space + one_line(keys)


def method_rank(method: str) -> tuple[int, bool, str]:
    """A sort key for the order of ``METHODS``; consolidated ones follow their base, unknown ones the others."""
    base = without_consolidation(method)
    return RANKS.get(base, len(RANKS)), method != base, method


def dataset_names(datasets: Iterable[str], patterns: Patterns = ()) -> dict[str, str]:
    """A distinct name for each data set; a path is shortened as far as it remains distinct."""
    names: dict[str, str] = {}
    for parts in range(1, 20):
        taken = Counter(names.values())
        for dataset in datasets:
            if taken[names.get(dataset, "")] != 1:
                names[dataset] = _dataset_name(dataset, patterns, parts)
    return names


def _dataset_name(dataset: str, patterns: Patterns, parts: int) -> str:
    shown = _matching(dataset, patterns)
    if shown is not None:
        return shown
    kind, colon, path = dataset.partition(":")
    if kind not in ("npz", "folder") or not colon:
        return DATASETS.get(dataset, one_line(dataset)[:LONGEST])
    name = "/".join(PurePath(path).parts[-parts:])
    return one_line(name.removesuffix(".npz") if kind == "npz" else name)[-LONGEST:] or kind


def _matching(name: str, patterns: Patterns) -> str | None:
    return next((one_line(text) for pattern, text in patterns if name == pattern or fnmatchcase(name, pattern)), None)


MARKDOWN_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {c: f"\\{c}" for c in "\\`*[]|"})
LATEX_ESCAPES = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", "†": r"$^\dagger$", "–": "--", "−": "--"}
    | {"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$"}
    | {"[": "{[}", "*": "{*}"}  # after a line's end, these would be read as its argument
    | {c: f"\\{c}" for c in "&%$#_{}"}
)


def _latex(text: str) -> str:
    return one_line(text).translate(LATEX_ESCAPES)


def _number(text: str) -> str:
    """A cell's text in LaTeX, with a minus sign and not a hyphen."""
    return f"$-${_latex(text[1:])}" if text.startswith("-") else _latex(text)


MARKDOWN = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
LATEX = MARKDOWN.overlay("<%", "%>", "<<", ">>", "<#", "#>")  # braces are LaTeX's own
HTML = MARKDOWN.overlay(autoescape=True, finalize=lambda text: text if isinstance(text, Markup) else one_line(text))
MARKDOWN.filters |= {"latex": _latex, "number": _number, "one_line": one_line, "shown": shown, "as_text": as_text}
MARKDOWN.filters["markdown"] = lambda text: one_line(text).translate(MARKDOWN_ESCAPES)  # all environments share these


def texts(macro: str, *facts: object) -> list[str]:
    """The lines of a macro of ``texts.j2``."""
    text = getattr(MARKDOWN.get_template("texts.j2").module, macro)(*facts)
    return [line for line in text.split("\n") if line]
