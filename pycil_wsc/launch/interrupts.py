"""Handling of Ctrl-C and of SIGTERM, which clusters send. Both stop the sweep, at the latest at its next progress."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

_received = False


def on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Install a handler for both signals. A signal that is ignored, as Ctrl-C in a background job, stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """The signal handler during a sweep: raise KeyboardInterrupt here, and again in :func:`check`.

    Python drops an exception raised in a finaliser or in the callback of a weak reference, hence the second time.
    """
    global _received
    if not _received:
        sys.unraisablehook = _report_unless_interrupted
    _received = True
    raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt if a signal was received."""
    if _received:
        raise KeyboardInterrupt


def _report_unless_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
