"""The forward and backward pass of a step as a CUDA graph: recorded once per phase, then launched as one."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pycil_wsc.engine.batch import Batch
from pycil_wsc.errors import UnusableRun, first_line

Compute = Callable[[Batch], tuple[Tensor, Tensor]]  # batch -> (loss, logits)


class Passes:
    """batch -> (loss, number of correct predictions), on the device; sets the gradients ``p.grad``."""

    def __init__(self, compute: Compute, optimizer: Optimizer):
        self.compute, self.optimizer = compute, optimizer

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, logits = self.compute(batch)
        loss.backward()
        return loss.detach(), (logits.detach().argmax(1) == batch.targets).sum()

    def clear(self) -> None:
        """Clear the gradients for the next step."""
        self.optimizer.zero_grad(set_to_none=True)


class RecordedPasses(Passes):
    """:class:`Passes` replayed from a recording, for batches of the same size as the first.

    The first ``eager`` steps are ordinary: in these, libraries choose their algorithms. The recording reads its batch
    from buffers and writes loss, count and gradients to others, which are valid until the next call. Raises
    :class:`UnusableRun` for a loss that cannot be recorded, such as one that waits for the device.

    ``record``: takes a function without arguments and returns a function that replays it, not called yet.
    """

    eager = 3

    def __init__(
        self,
        compute: Compute,
        optimizer: Optimizer,
        parameters: Iterable[Tensor],
        record: Callable[[Callable], Callable],
    ):
        super().__init__(compute, optimizer)
        self.parameters, self.record = list(parameters), record
        self.steps, self.size = 0, 0
        self.replay: Any = None  # a function, once recorded

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.size = self.size or len(batch)
        if len(batch) != self.size:
            return super().__call__(batch)
        self.steps += 1
        if self.steps <= self.eager:
            return super().__call__(batch)
        if not self.replay:
            self._record(batch)
        for buffer, tensor in zip(self.batch.tensors, batch.tensors, strict=True):
            buffer.copy_(tensor)
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        self.replay()
        return self.loss, self.right

    def _record(self, batch):
        self.batch = Batch.of_tensors(*(tensor.clone() for tensor in batch.tensors))
        self.clear()
        try:
            self.replay = self.record(self._passes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch does not recover: nothing more can be computed in this process
            reason = first_line(error.__context__ or error)
            raise UnusableRun(f"cuda_graph: the loss cannot be recorded ({reason}); set it to false") from error
        self.gradients = [parameter.grad for parameter in self.parameters]

    def _passes(self):
        self.loss, self.right = super().__call__(self.batch)


def cuda_graph(device: torch.device, function: Callable[[], None]) -> Callable[[], None]:
    """Record ``function`` and return its replay. Other threads may use ``device`` meanwhile, to pin the next batch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"):
                function()
        finally:
            torch.cuda.set_stream(stream)  # a failed recording may leave its own stream current
    return graph.replay


@functools.cache
def _stream(device):
    """The stream to record on. Some versions of torch keep a workspace of cuBLAS for each stream that ever recorded."""
    return torch.cuda.Stream(device)
