"""The environment of a run: its device, its peak memory, and the commit of the code."""

import contextlib
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from pycil_wsc.allocator import return_freed_memory
from pycil_wsc.errors import UserError

# needed by `deterministic`; cuBLAS reads it before its first matrix product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def resolved_device(name: str) -> torch.device:
    """The torch device for the key ``device``. PyCIL's list of GPUs gives the CPU on a machine without a GPU.

    Raises :class:`UserError` for a GPU that this machine does not have.
    """
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name.startswith("gpu:"):
        if not gpus:
            logging.getLogger("pycil_wsc").warning(
                "no GPU on this machine; the CPU is used instead of the configuration's list of GPUs"
            )
            return torch.device("cpu")
        name = name.replace("gpu", "cuda")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"device: '{name}' is not available (GPUs on this machine: {gpus}); use auto or cpu")
    return device


def numbered(device: torch.device) -> torch.device:
    """``device``; a CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def deterministic(wanted: bool) -> None:
    """Restrict torch to deterministic algorithms, or lift the restriction.

    With the restriction, an operation without a deterministic algorithm raises RuntimeError.
    """
    torch.use_deterministic_algorithms(wanted)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(
        r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    )
    return f"{model[1] if model else 'cpu'}, {torch.get_num_threads()} threads"


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # there are no statistics before
        torch.cuda.reset_peak_memory_stats(device)
    else:
        return_freed_memory()  # memory that the allocator kept from earlier runs does not count
        with contextlib.suppress(OSError):  # not Linux, or not allowed
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated by torch on a GPU, resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0])
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
