"""What is printed is for who looks on: where it cannot be written, runs go on without it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class BestEffort:
    """``stream`` (a text stream, or None where it was closed before the program began), whose failures cost nothing.

    Characters that its encoding lacks are written as escapes. After a failure (a full disk, a pipe that nobody reads
    any more) the rest goes nowhere.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError as error:
                    self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        stream: Any
        stream, self._stream = self._stream, None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream in memory has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # what it still holds must not fail when the interpreter ends
            os.close(nowhere)


@contextlib.contextmanager
def best_effort_output() -> Iterator[None]:
    """Within, nothing that is printed can fail: ``sys.stdout`` and ``sys.stderr`` are :class:`BestEffort`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(BestEffort, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
