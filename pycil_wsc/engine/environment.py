"""The environment of a run: deterministic algorithms, and the commit of the code."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

# needed by `deterministic`; cuBLAS reads it before its first matrix product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def deterministic(wanted: bool) -> None:
    """Restrict torch to deterministic algorithms, or lift the restriction.

    With the restriction, an operation without a deterministic algorithm raises RuntimeError.
    """
    torch.use_deterministic_algorithms(wanted)


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Within, torch computes with so many threads on the CPU; None: with as many as before."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number:
            torch.set_num_threads(before)


def commit() -> str | None:
    """The commit of this code, with ``-dirty`` if files were changed since; None outside a git checkout.

    On the nodes of a cluster, the driver's commit, from ``PYCIL_WSC_COMMIT``.
    """
    if known := os.environ.get("PYCIL_WSC_COMMIT"):
        return known
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed, perhaps within the checkout of another project
        return None
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.stdout.strip()
