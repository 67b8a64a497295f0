"""Errors that the user can fix. The command line prints them as one line and exits with code 2, without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: the message says what is wrong, where, and what to do, in one line."""


class UnusableRun(UserError):
    """What a run's folder holds cannot be used. Other runs go on."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name nearest to ``name``, or the list of known names if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
