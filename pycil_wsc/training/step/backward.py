"""The forward and backward pass of a step: operator by operator, compiled by torch, or shared by several processes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.training.batch_norm.parted import OwnBatchNorm, PartedBatchNorm
from pycil_wsc.training.batch_norm.synced import SyncedBatchNorm
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Loss, Phase, refuse_images_and_targets
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.trainable import Trainable

# what a loss may read of a batch beside its tensors
OTHERS = ("whole", "replayed", "replay", "slots", "stored", "plain")


class Backward:
    """Computes gradients ``p.grad``: ``backward(batch)`` -> (the phase's loss, number of correct predictions).

    ``backward(batch, loss)`` computes those of another loss. ``batch_norm_parts`` overrides the configuration's.
    """

    def __init__(self, learner: Trainable, phase: Phase, batch_norm_parts: int | None = None) -> None:
        self.learner = learner
        self.phase = phase
        self.parts = batch_norm_parts
        self.passes: dict[Callable, Passes] = {}  # loss -> its passes
        if learner.config.compile:
            torch.compiler.reset()  # what was compiled for the networks of earlier phases is of no more use
        self.last = self.of(phase.loss)

    def __call__(self, batch: Batch, loss: Callable | None = None) -> tuple[Tensor, Tensor]:
        self.clear()
        self.last = self.of(loss or self.phase.loss)
        return self.last(batch)

    @property
    def logits(self) -> Tensor:
        """The logits of the last batch, if some of its images enter the memory: (B, classes)."""
        assert self.last.logits is not None
        return self.last.logits

    def of(self, loss: Callable) -> "Passes":
        """The passes of a loss, made at its first use."""
        if loss not in self.passes:
            refuse_images_and_targets(loss, f"{self.phase.name}: loss")
            self.passes[loss] = passes(self.learner, self.phase, loss, self.parts)
        return self.passes[loss]

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch."""
        for passes_of_loss in self.passes.values():
            passes_of_loss.begin_epoch()

    def clear(self) -> None:
        """Clear the gradients."""
        self.last.clear()


def passes(learner: Trainable, phase: Phase, loss: Callable, batch_norm_parts: int | None = None) -> "Passes":
    """The forward and backward pass of a step of ``phase`` with ``loss``."""
    parts = batch_norm_parts or learner.config.batch_norm_parts
    alone = learner.processes.count == 1
    if alone and parts > 1:
        loss = _in_parts(loss, parts)

    def compute(batch):
        with learner.over.weights.within(batch), learner.precision.autocast(), single_image_refused(batch.weight):
            return _checked(loss(batch), phase)

    if not alone:
        _refuse_recomputed_batch_norm(learner)
        return SharedPasses(compute, phase.optimizer, learner.processes, own_batch_norm=parts > 1)
    if mode := learner.config.compile:
        fused = torch.compile(loss, dynamic=False, mode=None if mode is True else mode)

        def compiled(batch):
            with learner.over.weights.within(batch), learner.precision.autocast():
                return fused(batch)

        return CompiledPasses(compute, phase.optimizer, compiled)
    return Passes(compute, phase.optimizer)


class Passes:
    """batch -> (loss, number of correct predictions), on the device; sets the gradients ``p.grad``."""

    def __init__(self, compute: Loss, optimizer: Optimizer):
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

    def __init__(self, compute: Loss, optimizer: Optimizer, compiled: Loss):
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


class SharedPasses(Passes):
    """:class:`Passes` on this process's images of a batch; the gradients are those of the whole batch's mean loss.

    DistributedDataParallel wraps the loss, not the network: losses call parts of networks, several networks, or a part
    twice. The gradients of the parameters of ``optimizer`` are summed over processes; a parameter that no process uses
    keeps a gradient of None.

    ``own_batch_norm``: each process's batch norm normalises its own part; otherwise the whole batch.

    Returns this process's part of the mean loss and its number of correct predictions; their sums over processes are
    those of the whole batch. A process weighs as much as its number of images, those that are replayed included; it may
    be 0 in a last batch.
    """

    def __init__(self, compute: Loss, optimizer: Optimizer, processes: Processes, own_batch_norm: bool) -> None:
        super().__init__(compute, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.processes, self.own_batch_norm = processes, own_batch_norm
        self.shared = DistributedDataParallel(_LossModule(compute, parameters), find_unused_parameters=True)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        whole = self.processes.sum(torch.full((), float(batch.weight), device=batch.targets.device))
        share = batch.weight / whole
        with OwnBatchNorm(share) if self.own_batch_norm else SyncedBatchNorm():
            others = {name: getattr(batch, name) for name in OTHERS}
            loss, logits = self.shared(*batch.tensors, **others)
            part = loss * share
            (part * self.processes.count).backward()  # DistributedDataParallel takes the mean over processes
        self.logits = logits if batch.entering else None
        right = (logits.argmax(1) == batch.targets).sum()
        return part.detach() if batch.weight else torch.zeros_like(whole), right


class _LossModule(nn.Module):
    """A loss as a module with the trained parameters; without buffers, which DistributedDataParallel broadcasts."""

    def __init__(self, compute: Loss, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.compute, self.trained = compute, nn.ParameterList(parameters)

    def forward(
        self,
        images: Tensor,
        targets: Tensor,
        indices: Tensor,
        from_memory: Tensor,
        views: tuple[Tensor, ...],
        drawn: tuple[Tensor, ...],
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        batch = Batch(images, targets, indices, from_memory, views, drawn=drawn, **others)
        loss, logits = self.compute(batch)
        return loss, logits.detach()


def _refuse_recomputed_batch_norm(learner):
    """The second forward pass of checkpointed layers is in torch's backward pass, which runs outside the context that
    replaces batch norm.
    """
    if learner.config.grad_checkpointing and any(isinstance(module, _BatchNorm) for module in learner.modules()):
        raise UnusableRun(
            "grad_checkpointing: several processes cannot train a network with batch norm that way; leave it out, use "
            "a network without batch norm, or start a single process"
        )


def _checked(returned: Any, phase: Phase) -> tuple[Tensor, Tensor]:
    """What a loss has returned, if that is a loss and logits."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) == 2 and all(map(torch.is_tensor, parts)) and parts[0].ndim == 0:
        return returned
    forms = [tuple(part.shape) if torch.is_tensor(part) else type(part).__name__ for part in parts]
    raise UnusableRun(f"phase '{phase.name}': a loss returns (scalar loss, logits (B, classes)), not {forms}")


def _in_parts(loss, parts):
    def parted(batch):
        with PartedBatchNorm(parts):
            return loss(batch)

    return parted


@contextlib.contextmanager
def single_image_refused(number: int) -> Iterator[None]:
    """Say in one line what to do if batch norm cannot train on a batch of ``number`` images, which is one."""
    try:
        yield
    except ValueError as error:
        if number > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise UnusableRun(
            "batch_size: batch norm cannot train on a single image whose features are one pixel wide; raise "
            "batch_size or image_size, or give more images"
        ) from None
