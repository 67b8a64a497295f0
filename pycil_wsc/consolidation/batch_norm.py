"""Batch-norm statistics that fit averaged weights, and the modes of a pass that computes them."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Any]
LABELS = ("label", "labels", "label_ids")  # as Hugging Face's data collators name the targets


@torch.no_grad()
def recompute_batch_norm(model: nn.Module, batches: Iterable[Inputs]) -> None:
    """Replace the running statistics of all batch norms by the mean of their batches' statistics over one pass.

    The statistics collected in training do not belong to the averaged weights. Like
    ``torch.optim.swa_utils.update_bn``, with three differences: a batch norm that ``model.train()`` leaves in
    evaluation mode (frozen, as in expanding networks) keeps its statistics; the mode of each module is restored; an
    empty pass raises instead of leaving means of 0 and variances of 1. Without a batch norm to recompute, ``batches``
    is not iterated over.

    Args:
        model: a module called with one batch of inputs.
        batches: iterable of input tensors, of tuples or lists that begin with one, or of mappings of keyword arguments,
            such as ``trainer.get_train_dataloader()``, on the model's device. Labels in a mapping are passed to a model
            whose ``forward`` takes them, and left out otherwise.

    Raises:
        ValueError: ``batches`` is empty. After this or another error, the statistics are unchanged.
    """
    with restored_modes(model):
        model.train()
        norms = {
            m: m.momentum for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats
        }
        before = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}
        try:
            if norms:
                _collect(model, list(norms), iter(batches))
        except BaseException:
            for norm, buffers in before.items():
                for buffer, old in zip(norm.buffers(), buffers):
                    buffer.copy_(old)
            raise
        finally:
            for norm, momentum in norms.items():
                norm.momentum = momentum


def _collect(model: nn.Module, norms: list[_BatchNorm], batches: Iterator[Inputs]) -> None:
    first = next(batches, None)
    if first is None:
        raise ValueError(
            "no batch to recompute batch-norm statistics from: `batches` is empty, or an iterator already used up"
        )
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative mean, also where a batch passes a norm twice or not at all
    arguments = inspect.signature(model.forward).parameters
    for batch in chain([first], batches):
        if isinstance(batch, Mapping):
            model(**_accepted(batch, arguments))
        else:
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _accepted(batch: Mapping[str, Any], arguments: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The batch without labels that ``forward``, with these ``arguments``, does not take.

    Other keys stay, so that one that it does not know is an error. Labels stay where they can: a model that shifts
    them into the decoder's inputs needs them.
    """
    takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    return {name: value for name, value in batch.items() if takes_all or name in arguments or name not in LABELS}


@contextlib.contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """A context in which modes may change; on exit, each module of ``model`` has its mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
