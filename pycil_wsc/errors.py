"""Errors that are reported in one line, without a traceback. Of a :class:`UserError` the exit code is 2."""

import difflib
import json
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: the message says what is wrong, where, and what to do, in one line.

    A name that is quoted in it may hold line breaks and control characters: they are shown as escapes.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


class UnusableRun(UserError):
    """What a run's folder holds cannot be used. Other runs go on."""


class TrainingDiverged(Exception):
    """The loss, the gradients, the weights or the test logits of a run are no longer finite numbers."""


class WrongPlan(Exception):
    """A learner trained on another number of images than its class plans: a mistake in the class."""


def one_line(text: str) -> str:
    """``text`` with escapes for what is not printable: line breaks, control characters, lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name nearest to ``name``, or the list of known names if none is near."""
    if "," in str(name):
        return f"; several values are a list: [{name}]"
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


def shown(value: object, quotes: bool = False) -> str:
    """A value as JSON has it, for an error: a long one is cut, and a string has ``quotes`` only if asked for."""
    text = value if isinstance(value, str) and not quotes else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
