"""The forward and backward pass of a step: operator by operator, or with a loss that torch compiles."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.training.batches import Batch

Compute = Callable[[Batch], tuple[Tensor, Tensor]]  # batch -> (loss, logits)


class Passes:
    """batch -> (loss, number of correct predictions), on the device; sets the gradients ``p.grad``."""

    def __init__(self, compute: Compute, optimizer: Optimizer):
        self.compute = compute
        self.optimizer = optimizer
        self.logits: Tensor | None = None  # (B, classes), of the last batch

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, logits = self.compute(batch)
        loss.backward()
        self.logits = logits.detach() if batch.entering else None
        return loss.detach(), (logits.detach().argmax(1) == batch.targets).sum()

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch."""

    def clear(self) -> None:
        """Clear the gradients for the next step."""
        self.optimizer.zero_grad(set_to_none=True)


class CompiledPasses(Passes):
    """:class:`Passes` with a ``compiled`` loss, for batches of the same size as the first.

    Batches of other sizes are computed operator by operator, so that a loss is compiled once. So is the first step of
    each epoch: torch counts its arithmetic, and a run that resumes with this epoch computes the same numbers.
    """

    def __init__(self, compute: Compute, optimizer: Optimizer, compiled: Compute):
        super().__init__(compute, optimizer)
        self.plain = compute
        self.compiled = compiled
        self.sizes: tuple[int, ...] = ()
        self.first = True  # whether the next step is the first of an epoch

    def begin_epoch(self) -> None:
        self.first = True

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sizes = tuple(len(part) for part in (batch.images, *batch.views, *batch.drawn))
        self.sizes = self.sizes or sizes
        ordinary = self.first or sizes != self.sizes
        self.first = False
        self.compute = self.plain if ordinary else self._compiled
        return super().__call__(batch)

    def _compiled(self, batch):
        from torch._dynamo.exc import TorchDynamoException  # importing it takes seconds: not without `compile`

        torch.compiler.cudagraph_mark_step_begin()  # what the previous step returned may be overwritten
        try:
            return self.compiled(batch)
        except TorchDynamoException as error:
            reason = first_line(error)
            if reason.endswith("raised:"):  # the next line says what
                reason = " ".join(str(error).strip().splitlines()[:2])
            raise UnusableRun(f"compile: torch cannot compile the loss ({reason}); set it to false") from error
