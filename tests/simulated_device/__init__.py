"""A simulated accelerator for machines without one: torch's devices ``sim:0`` and ``sim:1``.

Their memory is the host's and their operators are the CPU's, so that results equal the CPU's bit for bit. In all else
torch treats them as any accelerator: operands of two devices raise, and so does a generator of another device. Waits
and copies are counted. The C++ part is built once per version of itself and of torch, in torch's folder for extensions.

    with simulated_device.present():
        network.to("sim")
        with simulated_device.counted() as counts:
            ...
"""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "sim"
SOURCE = Path(__file__).parent / "device.cpp"
FREE = 2**30  # bytes that the device says are free


@dataclass
class Counts:
    """What happened on the device."""

    waits: int = 0
    uploads: int = 0
    operators: int = 0


class Capabilities:
    """What the simulated device has; :func:`without` takes things away."""

    present = False
    bf16 = True
    free = FREE


def reason_to_skip() -> str | None:
    """Why the device cannot be built here, or None."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        return f"the simulated device needs a C++ compiler, and '{compiler}' is not there"
    if not cpp_extension.is_ninja_available():
        return "the simulated device needs ninja to be built"
    return None


def register() -> None:
    """Build the device if necessary, and register it with torch, before its first backward pass in this process."""
    _extension()


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Within, this machine has the simulated device as its accelerator."""
    _extension()
    Capabilities.present = True
    try:
        yield
    finally:
        Capabilities.present = False
        _extension().set_device(0)


@contextlib.contextmanager
def without(*operators: str, float64: bool = True, bf16: bool = True, free: int = FREE) -> Iterator[None]:
    """Within, the device lacks these ``operators`` (as ``aten::topk``) or dtypes, or has ``free`` bytes left."""
    _extension().set_missing(set(operators))
    _extension().set_float64(float64)
    Capabilities.bf16, Capabilities.free = bf16, free
    try:
        yield
    finally:
        _extension().set_missing(set())
        _extension().set_float64(True)
        Capabilities.bf16, Capabilities.free = True, FREE


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Yield the counts of what happens within; they are there at the end."""
    counts, before = Counts(), total()
    yield counts
    after = total()
    counts.waits = after.waits - before.waits
    counts.uploads = after.uploads - before.uploads
    counts.operators = after.operators - before.operators


def total() -> Counts:
    """What has happened so far."""
    return Counts(*_extension().counts())


def take_launched() -> set[str]:
    """The names of the operators launched since the last call, such as ``aten::topk``."""
    return _extension().take_launched()


# ---- torch.sim: what torch, and those who use it, ask a device's module --------------------------------------------


@functools.cache
def _extension():
    versions = f"{torch.__version__} {sys.version}"
    digest = hashlib.sha256(SOURCE.read_bytes() + versions.encode()).hexdigest()[:12]
    flags = ["-O1", "-DAT_PER_OPERATOR_HEADERS"]  # without the headers of all operators it compiles faster
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root, f"simulated_device_{digest}")
    source = folder / SOURCE.name  # of one copy, a checkout elsewhere builds nothing again
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE, own := folder / f"{os.getpid()}")
        os.replace(own, source)
    extension = cpp_extension.load(folder.name, [str(source)], extra_cflags=flags, build_directory=str(folder))
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_hooks()
    torch._register_device_module(NAME, _module(extension))
    return extension


def _module(extension):
    module = types.ModuleType(f"torch.{NAME}")

    def index_of(device=None):
        if device is None:
            return extension.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return extension.current_device() if index is None else index

    def count():
        return extension.device_count() if Capabilities.present else 0

    def manual_seed_all(seed):
        for index in range(extension.device_count()):
            extension.default_generator(index).manual_seed(seed)

    module.is_available = lambda: Capabilities.present
    module.is_initialized = lambda: Capabilities.present
    module.device_count = count
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index_of(device))
    module.synchronize = lambda device=None: extension.wait()
    module.get_device_name = lambda device=None: "simulated device"
    module.is_bf16_supported = lambda including_emulation=True: Capabilities.bf16
    module.get_amp_supported_dtype = lambda: [torch.float16, *([torch.bfloat16] if Capabilities.bf16 else [])]
    module.memory_allocated = lambda device=None: extension.memory_allocated(index_of(device))
    module.max_memory_allocated = lambda device=None: extension.max_memory_allocated(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: extension.reset_peak_memory(index_of(device))
    module.mem_get_info = lambda device=None: (Capabilities.free, 2 * FREE)
    module.empty_cache = lambda: None
    module.manual_seed = lambda seed: extension.default_generator(extension.current_device()).manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=NAME: extension.default_generator(index_of(device)).get_state()
    module.set_rng_state = lambda state, device=NAME: extension.default_generator(index_of(device)).set_state(state)
    module._is_in_bad_fork = lambda: False
    return module
