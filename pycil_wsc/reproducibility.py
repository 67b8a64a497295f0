"""The environment of a run: deterministic algorithms, threads, and the code: its commit and its digest."""

import contextlib
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

# needed by `deterministic`; cuBLAS reads it before its first matrix product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context in which torch is restricted to deterministic algorithms if that is ``wanted``, and not otherwise.

    With the restriction, an operation without a deterministic algorithm raises RuntimeError.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """A context in which torch uses ``number`` CPU threads; None: as many as before."""
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

    Within a sweep, the one at its start, from ``PYCIL_WSC_COMMIT``.
    """
    if known := os.environ.get("PYCIL_WSC_COMMIT"):
        return known
    here = Path(__file__).parents[1]
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


@contextlib.contextmanager
def kept_commit() -> Iterator[None]:
    """A context in which :func:`commit` stays the same, here and in new processes, whatever is then checked out."""
    known, now = os.environ.get("PYCIL_WSC_COMMIT"), commit()
    os.environ["PYCIL_WSC_COMMIT"] = now or ""
    try:
        yield
    finally:
        if known is None:
            del os.environ["PYCIL_WSC_COMMIT"]
        else:
            os.environ["PYCIL_WSC_COMMIT"] = known


def digest(paths: Iterable[str | Path]) -> str:
    """A digest of the contents of files."""
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def _code():
    root = Path(__file__).parent
    rooms = [root / name for name in ("data", "networks", "training", "methods", "consolidation")]
    return digest([root / "seeding.py", *(path for room in rooms for path in sorted(room.rglob("*.py")))])


CODE = _code()  # a digest of the source that computes, as it is imported: it may be edited while runs go on


def code_elsewhere(used: Iterable[object]) -> list[str]:
    """Digests of the other packages and modules that define what is ``used``: classes and functions."""
    modules = {inspect.getmodule(definition) for definition in used}
    names = {module.__name__.partition(".")[0] for module in modules if module}
    digests = []
    for name in sorted(names - {"pycil_wsc", "torch", *sys.stdlib_module_names}):
        module = sys.modules[name]
        paths = [path for folder in getattr(module, "__path__", []) for path in sorted(Path(folder).rglob("*.py"))]
        file = getattr(module, "__file__", None)
        if file and not paths:
            paths = [Path(file)]
        digests.append(digest(paths) if paths else os.urandom(8).hex())  # without source, as in a notebook: not shared
    return digests
