"""Helpers for attacks on the command line: folders with tiny data, checked commands, and ways to damage files."""

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support.small_runs import small_data  # noqa: E402

from pycil_wsc.launch.command import main  # noqa: E402

EXIT_CODES = {0, 1, 2, 130}
REMARKS = ("; it is a key of ", ": does not exist; downloading ")  # printed before a command goes on, or fails
NOBODY = 65534  # the user without rights on every Linux


class Fault(AssertionError):
    """The command line gave a forbidden answer."""


def answer(arguments: list[str]) -> tuple[int, str, str]:
    """The exit code of the command line in this process, and what it printed;
    :class:`Fault` for an answer that is none.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), undrawn():
            code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    except Exception:
        raise Fault(f"{arguments}: {traceback.format_exc()}") from None
    printed = f"{arguments}: exit code {code}\n{out.getvalue()}{err.getvalue()}"
    if code not in EXIT_CODES or "Traceback" in printed or "traceback in log.txt" in printed:
        raise Fault(printed)
    errors = [line for line in err.getvalue().splitlines() if not any(remark in line for remark in REMARKS)]
    if code == 2 and not (len(errors) == 1 and errors[0].startswith("error: ")):
        raise Fault(f"not one line: {printed}")
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Reports without figures, which would take seconds."""
    with patch("pycil_wsc.report.page.figures", lambda group: ()):
        yield


class Place:
    """A folder with a tiny data set, and a configuration for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, small_data(folder / "data.npz", classes=2, per_class=3)
        self.out = folder / "runs"
        self.settings: dict[str, Any] = {
            "dataset": f"npz:{self.data}",
            "out": str(self.out),
            "model_name": "replay",
            "memory_per_class": 1,
            "init_cls": 1,
            "increment": 1,
            "convnet_type": "resnet8",
            "device": "cpu",
            "threads": 1,
            "init_epoch": 1,
            "epochs": 1,
            "batch_size": 4,
        }

    def config(self, changes: Any) -> str:
        """A file with the settings and ``changes``, or with ``changes`` alone where they are no keys."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(self.settings | changes if isinstance(changes, dict) else changes))
        return str(path)

    def run(self, changes: Any, *options: str) -> tuple[int, str, str]:
        return answer(["--config", self.config(changes), *options])


@contextlib.contextmanager
def ordinary_user(folder: Path) -> Iterator[None]:
    """A context in which this process has the rights of a user who owns ``folder`` and is not root."""
    if os.geteuid():
        yield
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    """A temporary folder that any user can access, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as folder:
        yield Place(Path(folder))
