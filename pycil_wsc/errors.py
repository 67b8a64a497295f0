"""Errors that are reported in one line, without a traceback. A :class:`UserError` leads to the exit code 2."""

import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

MOST_NAMED = 100  # known names that an error lists
LONGEST = 6000  # characters of a message; a longer one is cut in its middle
LONGEST_NAME = 200  # characters of a name that are compared with known ones
NEAR = 0.6  # the least similarity of a name that is suggested
LIBRARIES = {"torch", "torchvision", "numpy", "scipy", "sklearn", "PIL", "timm", "transformers", "peft", "accelerate"}
PACKAGE = __name__.partition(".")[0]


class UserError(Exception):
    """Invalid input: the message says in one line what is wrong, where, and what to do.

    Unprintable characters in quoted names are shown as escapes.
    """

    def __str__(self) -> str:
        line = one_line(super().__str__())
        return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


class UnusableRun(UserError):
    """A run cannot be trained as configured, or its folder cannot be used. Other runs continue."""


class OtherSettings(UnusableRun):
    """The folder of a run has another run's result, whose settings give the same folder name."""


class Unwritable(UserError):
    """A file cannot be written, as on a full disk: no run can go on."""


class TrainingDiverged(Exception):
    """The loss, the gradients, the weights or the test logits of a run are no longer finite numbers."""


class WrongPlan(Exception):
    """A learner did not train on the planned number of images: an error in its class."""


def lack_of_memory(error: BaseException) -> str:
    """The message of a command that ran out of memory."""
    return f"there is not enough memory ({described(error).rstrip(': ')}); free some, or give the command less at once"


def plural(count: int, noun: str) -> str:
    """``1 image``, ``3 images``, ``2 classes``."""
    if count != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{count} {noun}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def described(error: BaseException) -> str:
    """The type of an error and its message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def raised_at(error: BaseException) -> str:
    """``"file:line"`` where an error was raised: in code that is plugged in, such as a hook, else in the package.

    What libraries do below that is not named. Empty if the error has not been raised.
    """
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        top = frame.f_globals.get("__name__", "").partition(".")[0]
        if top not in LIBRARIES and top not in sys.stdlib_module_names:
            frames.append((top, frame.f_code.co_filename, line))
    tops = [top for top, _, _ in frames]
    called = frames[tops.index(PACKAGE) :] if PACKAGE in tops else frames
    plugged_in = [frame for frame in called if frame[0] != PACKAGE]
    if not frames:
        return ""
    _, path, line = (plugged_in or called)[-1]
    return f"{short_path(path)}:{line}"


def place_of(error: BaseException, path: Path, line: int | None = None) -> str:
    """``path`` with the number of the ``line``, by default of the innermost one there that led to the error."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if line is None and frame.f_code.co_filename == str(path):
            line = number
    return short_path(path) if line is None else f"{short_path(path)}:{line}"


def short_path(path: str | Path) -> str:
    """``path`` from the working folder on, if it is below it."""
    try:
        return str(Path(path).relative_to(os.getcwd()))
    except (ValueError, OSError):
        return str(path)


def one_line(text: object) -> str:
    """``text`` with unprintable characters (line breaks, control characters, lone surrogates) as escapes."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or a list of known names if none is similar."""
    text = str(name)
    if hint := list_hint(text):
        return hint
    known = sorted(known)
    alike = {comparable(name): name for name in reversed(known)}
    near = difflib.get_close_matches(comparable(text[:LONGEST_NAME]), alike, n=1, cutoff=NEAR)
    if near:
        return f"; did you mean '{alike[near[0]]}'?"
    more = f", and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return f"; known: {', '.join(known[:MOST_NAMED])}{more}"


def list_hint(text: str) -> str:
    """How several values are written, if ``text`` looks like some; "" otherwise."""
    if text.startswith("["):
        return "; close the list with ]"
    return f"; several values are a list: [{shown(text)}]" if "," in text else ""


def comparable(name: str) -> str:
    """``name`` as it is compared with others: ``ER-ACE`` is ``er_ace``, and ``der++`` ``derpp``."""
    return re.sub(r"[- ]", "_", name.lower().replace("+", "p"))


def shown(value: object, quotes: bool = False) -> str:
    """``value`` as JSON for an error message; long values are cut, and strings have no quotes unless ``quotes``."""
    text = value if isinstance(value, str) and not quotes else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
