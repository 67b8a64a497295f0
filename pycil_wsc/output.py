"""Console output that never fails a run: text that cannot be written is dropped. Also parsing of the command line."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NoReturn, TextIO, TypeVar

from pycil_wsc.errors import one_line

FIRST_LINE, MOST_SECONDS = 2.0, 60.0  # seconds to the first line on how far a loop is, and at most to the next one
T = TypeVar("T")


def watched(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The ``items``, of ``total`` runs. If they take long, lines on stderr say how far the caller is."""
    began = time.monotonic()
    due = FIRST_LINE
    for number, item in enumerate(items):
        if number == 1:  # the first one also reads the data
            began = time.monotonic()
        spent = time.monotonic() - began
        if spent > due and number > 1:
            left = timedelta(seconds=round(spent / (number - 1) * (total - number)))
            print(f"{what}: {number:,} of {total:,} runs, about {left} left", file=sys.stderr, flush=True)
            due = spent + min(4 * spent, MOST_SECONDS)
        yield item


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; see --help\n")


class BestEffort:
    """Wraps ``stream`` (a text stream, or None if it was closed before the program began) so that writing never fails.

    Characters that its encoding lacks are escaped. After a failure (a full disk, a closed pipe) further output is
    dropped.
    """

    def __init__(self, stream: TextIO | None) -> None:
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

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # flushing buffered text at the interpreter's exit must not fail
            os.close(nowhere)


@contextlib.contextmanager
def best_effort_output() -> Iterator[None]:
    """A context in which ``sys.stdout`` and ``sys.stderr`` are :class:`BestEffort`: printing cannot fail."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(BestEffort, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
