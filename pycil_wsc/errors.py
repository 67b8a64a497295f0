"""Errors that are reported in one line, without a traceback. A :class:`UserError` leads to the exit code 2."""

import difflib
import json
from collections.abc import Iterable

MOST_NAMED = 100  # known names that an error lists


class UserError(Exception):
    """Invalid input: the message says in one line what is wrong, where, and what to do.

    Unprintable characters in quoted names are shown as escapes.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


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


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def described(error: BaseException) -> str:
    """The type of an error and its message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def one_line(text: object) -> str:
    """``text`` with unprintable characters (line breaks, control characters, lone surrogates) as escapes."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or a list of known names if none is similar."""
    if "," in str(name):
        return f"; several values are a list: [{name}]"
    known = sorted(known)
    lower = {each.lower(): each for each in reversed(known)}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{lower[near[0]]}'?"
    more = f", and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return f"; known: {', '.join(known[:MOST_NAMED])}{more}"


def shown(value: object, quotes: bool = False) -> str:
    """``value`` as JSON for an error message; long values are cut, and strings have no quotes unless ``quotes``."""
    text = value if isinstance(value, str) and not quotes else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
