"""The forward and backward pass of a step, with the phase's loss or another."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc.errors import UnusableRun
from pycil_wsc.training.batch_norm.parted import PartedBatchNorm
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase, refuse_images_and_targets
from pycil_wsc.training.step.passes import CompiledPasses, Passes
from pycil_wsc.training.step.shared_passes import SharedPasses
from pycil_wsc.training.trainable import Trainable


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

    def of(self, loss: Callable) -> Passes:
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


def passes(learner: Trainable, phase: Phase, loss: Callable, batch_norm_parts: int | None = None) -> Passes:
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
