"""Rows of a batch that several processes share, for losses that compare every image with every other."""

import torch
from torch import Tensor

from pycil_wsc.engine.processes import Processes


def whole_batch(rows: Tensor, processes: Processes, whole: int) -> tuple[Tensor, Tensor]:
    """The rows of all processes, to whose own the gradients return. Does not synchronise with the device.

    Args:
        rows: (n, d), those of this process's part of the batch (:attr:`Processes.share_of_each_batch`).
        processes: they share the batch.
        whole: the rows of all.

    Returns:
        (``whole``, d) rows in the order of the batch, and int64 (n,), where this process's own stand.
    """
    places = processes.rank + processes.count * torch.arange(len(rows), device=rows.device)
    if processes.count == 1:
        return rows, places
    placed = rows.new_zeros(whole, rows.shape[1]).index_copy(0, places, rows)
    return _Sum.apply(placed, processes), places  # pyright: ignore[reportReturnType]


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.sum(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.processes.sum(gradient), None
