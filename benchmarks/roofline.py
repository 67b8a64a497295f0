"""Roofline model: the least time a step's operators can take, each bound by its operations or by its memory traffic."""

import functools
import statistics
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pycil_wsc.devices import synchronize


class Roofline(TorchDispatchMode):
    """Counts every operator inside the context: total ``operations`` and ``bytes``, and ``seconds`` at the given rates.

    Operations are those of convolutions and matrix products; a multiplication and an addition are two. An operator
    reads its arguments and writes its results once; views are free. Data that stays in a cache between two operators
    counts as read again, so a machine whose caches hold the activations can be faster than this.

    Args:
        operations_per_second: rate of matrix products, at the step's precision.
        bytes_per_second: memory bandwidth, reads and writes together.
    """

    def __init__(self, operations_per_second, bytes_per_second):
        super().__init__()
        self.rates = operations_per_second, bytes_per_second
        self.operations = self.bytes = self.seconds = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        operations = count(*args, **kwargs, out_val=result) if count else 0
        moved = (
            0
            if is_free(func)
            else sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
        )
        self.operations += operations
        self.bytes += moved
        self.seconds += max(operations / self.rates[0], moved / self.rates[1])
        return result


def is_free(func):
    """Whether an operator only creates a view or uninitialised memory."""
    views = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
    return views or func.overloadpacket.__name__.startswith(("empty", "new_empty", "_unsafe_view"))


@functools.cache
def machine_rates(device, precision, repeats=7):
    """Measured rates: operations per second of a large matrix product, bytes per second of a large copy."""
    side, dtype = (8192 if device.type != "cpu" else 2048), {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    rounding = torch.get_float32_matmul_precision()
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32 where there is one, as in torch's convolutions by default
    source = torch.zeros(2**28 if device.type != "cpu" else 2**26, device=device)
    target = torch.zeros_like(source)
    product, copy = (
        median_seconds(function, device, repeats) for function in (lambda: a @ b, lambda: target.copy_(source))
    )
    torch.set_float32_matmul_precision(rounding)
    return 2 * side**3 / product, 2 * source.nbytes / copy


def median_seconds(function, device, repeats):
    """Median of ``repeats`` calls after one warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        start = now(device)
        function()
        seconds.append(now(device) - start)
    return statistics.median(seconds[1:])


def now(device):
    """Time in seconds after the device has finished its work; the clock is shared by all processes of a machine."""
    synchronize(device)
    return time.perf_counter()
