"""The device that computes: how it is chosen, named and waited for, and its memory.

No code names a kind of device: this file asks torch, and all other code uses the device of the tensors at hand, so that
CUDA, ROCm, MPS, XPU and devices that register themselves with torch are one path.
"""

import contextlib
import functools
import gc
import logging
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from pycil_wsc.allocator import return_freed_memory
from pycil_wsc.errors import UserError, plural

try:
    import resource
except ImportError:
    raise UserError("pycil_wsc runs on Linux and macOS; on Windows, use WSL") from None

CPU = torch.device("cpu")


# ---- choice --------------------------------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """The machine's accelerator, without a number; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def count() -> int:
    """The number of accelerators of this machine."""
    return torch.accelerator.device_count() if accelerator() else 0


def resolved_device(name: str) -> torch.device:
    """The torch device for the key ``device``. PyCIL's list of GPUs gives the CPU on a machine without an accelerator.

    Raises :class:`UserError` for a device that this machine does not have.
    """
    device = accelerator()
    if name == "auto":
        return device or CPU
    if name.startswith("gpu:"):
        if not device:
            logging.getLogger("pycil_wsc").warning(
                "no GPU on this machine; the CPU is used instead of the configuration's list of GPUs"
            )
            return CPU
        name = name.replace("gpu", device.type)
    device_type, _, number = name.partition(":")
    if device_type == "cpu" and int(number or 0) == 0:
        return CPU
    if device is None or device_type != device.type or int(number or 0) >= count():
        raise UserError(f"device: '{name}' is not available ({_available()}); use auto or cpu")
    return torch.device(name)


def _available() -> str:
    device = accelerator()
    if device is None:
        return "no GPU on this machine that this torch can use"
    names = [f"{device.type}:{number}" for number in range(count())]
    return "on this machine: " + ", ".join(names)


def numbered(device: torch.device) -> torch.device:
    """``device``; an accelerator without a number is the current one."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def make_current(device: torch.device) -> None:
    """Let ``device`` be the one that its type without a number means. The CPU is always current."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(numbered(device).index)


def take_turns(number: int, wanted: str) -> None:
    """Let the worker process ``number`` compute on its own accelerator, if there are several.

    Nothing is done if ``wanted``, as in the configuration, is the CPU or one of them by its number.
    """
    if wanted != "cpu" and ":" not in wanted and count() > 1:
        torch.accelerator.set_device_index(number % count())  # the one that "auto" and a type without a number select


# ---- name, waits ---------------------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """The model of the device; for the CPU, with the number of threads."""
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
        threads = torch.get_num_threads()
        return f"{model[1] if model else 'cpu'}, {plural(threads, 'thread')}"
    name = getattr(_module(device), "get_device_name", None)
    return name(device) if name else device.type


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def used() -> bool:
    """Whether this process has computed on an accelerator, as far as is known."""
    device = accelerator()
    if not device:
        return False
    initialized = getattr(_module(device), "is_initialized", None)
    return initialized() if initialized else True


# ---- memory --------------------------------------------------------------------------------------------------------


def release_memory() -> None:
    """Free what earlier runs of this process, failed ones above all, have left on its accelerator."""
    device = accelerator()
    if device and used():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # after some errors a device does nothing more
            _module(device).empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a lack of memory, of the CPU or of an accelerator."""
    known = "can't allocate memory", "out of memory", "ALLOC_FAILED"  # of the CPU, of CUDA and MPS, of cuBLAS
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in known)


def free_memory(device: torch.device) -> float:
    """Free bytes of ``device``; infinite where torch does not tell, as for memory that is the host's."""
    information = getattr(_module(device), "mem_get_info", None)
    return information(device)[0] if information else float("inf")


def memory_in_use(device: torch.device) -> int:
    """Bytes that the tensors on an accelerator take."""
    module = _module(device)
    return module.memory_allocated(device) if hasattr(module, "memory_allocated") else module.current_allocated_memory()


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory` count from now on, where the system allows it."""
    if device.type != "cpu":
        torch.empty(0, device=device)  # there are no statistics before the first tensor
        getattr(_module(device), "reset_peak_memory_stats", lambda device: None)(device)
        return
    return_freed_memory()  # memory that the allocator kept from earlier runs does not count
    with contextlib.suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated by torch on an accelerator (on MPS held, as torch counts no peak there), resident in this
    process on the CPU.
    """
    if device.type != "cpu":
        module = _module(device)
        counted = getattr(module, "max_memory_allocated", None)
        return counted(device) if counted else module.driver_allocated_memory()
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0])
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- numbers -------------------------------------------------------------------------------------------------------


@functools.cache
def computes_bf16(device: torch.device) -> bool:
    """Whether torch's autocast has bf16 on ``device``. Where it has not, it would compute in fp32 and only warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device.type, torch.bfloat16):
                return torch.is_autocast_enabled(device.type)
        except RuntimeError:
            return False


@functools.cache
def computes_bf16_natively(device: torch.device) -> bool:
    """Whether bf16 saves time on ``device``; False where torch does not tell."""
    if not computes_bf16(device):
        return False
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    supported = getattr(_module(device), "is_bf16_supported", None)
    if supported is None:
        return False
    with _current(device):  # which is the one that torch answers for
        try:
            return bool(supported(including_emulation=False))
        except TypeError:  # other devices than torch's own take no argument
            return bool(supported())


@contextlib.contextmanager
def _current(device):
    """A context in which ``device`` is the current one of its type, if it has a number."""
    if device.index is None:
        yield
        return
    before = numbered(torch.device(device.type))
    make_current(device)
    try:
        yield
    finally:
        make_current(before)


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """The dtype of sums over many numbers: float64, or float32 on a device without float64, such as MPS."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _module(device: torch.device) -> ModuleType:
    """``torch.cuda``, ``torch.mps``, ...: torch's functions for the type of ``device``."""
    return torch.get_device_module(device)
