"""The templates of all texts, and what their formats need to be escaped."""

from pathlib import Path

import jinja2

from pycil_wsc.errors import shown
from pycil_wsc.report.names import as_text, clean

MARKDOWN_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {c: f"\\{c}" for c in "\\`*[]|"})
LATEX_ESCAPES = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", "†": r"$^\dagger$", "–": "--", "−": "--"}
    | {"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "\ufffd": "?"}
    | {"[": "{[}", "*": "{*}"}  # after a line's end, these would be read as its argument
    | {c: f"\\{c}" for c in "&%$#_{}"}
)


def _markdown(text: str) -> str:
    return clean(text).translate(MARKDOWN_ESCAPES)


def _latex(text: str) -> str:
    return clean(text).translate(LATEX_ESCAPES)


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
MARKDOWN.filters |= {"markdown": _markdown, "latex": _latex, "number": _number}  # shared by all environments
MARKDOWN.filters |= {"clean": clean, "shown": shown, "as_text": as_text}


def texts(kind: str, *facts: object) -> list[str]:
    """The lines of a macro of ``texts.j2``."""
    text = getattr(MARKDOWN.get_template("texts.j2").module, kind)(*facts)
    return [line for line in text.split("\n") if line]
