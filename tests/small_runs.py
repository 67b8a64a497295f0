"""Runs of a second or two for tests: their data, their command and what they leave."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from pycil_wsc.runs.run import Run

ROOT = Path(__file__).parent.parent
MEASURED = {"train_seconds", "train_seconds_spent", "total_seconds", "importance_seconds", "peak_memory_bytes"}


def small_data(path, classes=6, per_class=12, size=8):
    """Noisy class templates, as an npz file."""
    rng = np.random.default_rng(0)
    templates = rng.integers(0, 200, (classes, size, size, 3))
    arrays = {}
    for split in ("train", "test"):
        targets = np.repeat(np.arange(classes), per_class)
        arrays[f"{split}_x"] = (templates[targets] + rng.integers(0, 56, (len(targets), size, size, 3))).astype(
            np.uint8
        )
        arrays[f"{split}_y"] = targets
    np.savez(path, **arrays)
    return path


def write(tmp_path, settings):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    return str(path)


def results(settings):
    return {path.parent: json.loads(path.read_text()) for path in Path(settings["out"]).rglob("result.json")}


def without_measurements(result):
    return {key: value for key, value in result.items() if key not in MEASURED}


def command(tmp_path, settings, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, ROOT / "main.py", "--config", write(tmp_path, settings), *options]
    listen = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a shell's background job inherits that it is ignored
    return subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )


def wait_until(reached, process):
    """Until ``reached()``, which must be before ``process`` ends."""
    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


class Killed(BaseException):
    """What SIGKILL is to a process, where the test must live on."""


@contextlib.contextmanager
def killed_at(last, of=Run, saved=True):
    """Within, a run dies at a checkpoint, ``saved`` just before or not at all.

    ``last``: the checkpoint's number, from 1, or a function of the list of what ``_checkpoint`` was called with so far.
    """
    checkpoint, calls = of._checkpoint, []

    def checkpoint_and_die(run, *arguments):
        calls.append(arguments)
        dies = last(calls) if callable(last) else len(calls) == last
        if saved or not dies:
            checkpoint(run, *arguments)
        if dies:
            raise Killed

    with patch.object(of, "_checkpoint", checkpoint_and_die), pytest.raises(Killed):
        yield
