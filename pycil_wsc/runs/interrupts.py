"""Ctrl-C and SIGTERM, which clusters send: either stops the sweep, at the latest when it next shows its progress."""

import signal
import sys
from collections.abc import Callable
from typing import Any

_received = False


def on_signals(handler: Callable[[int, Any], Any]) -> None:
    """Handle both signals. A job in the background of a shell goes on ignoring Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number: int, frame: Any) -> None:
    """The handler of a running sweep: raise KeyboardInterrupt, here and in :func:`check`.

    Once is not enough: Python drops an exception that is raised within a finaliser or the callback of a weak reference.
    """
    global _received
    if not _received:
        sys.unraisablehook = _say_unless_interrupted
    _received = True
    raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt if a signal has asked for it."""
    if _received:
        raise KeyboardInterrupt


def _say_unless_interrupted(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
