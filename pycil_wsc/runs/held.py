"""The bytes that a learner must keep between two tasks: its state and its exemplars."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.configured import bytes_of
from pycil_wsc.errors import UserError
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.learner_state import stored_of, tensors_of, without_memory


def held(learner: BaseLearner, images: np.ndarray) -> dict[str, int] | None:
    """The bytes that ``learner`` keeps after a task, by part; None if an exemplar's file is gone.

    ``network``: the weights and statistics of ``learner.network``. ``further``: all other tensors of its
    ``state_dict``: further networks, importances, averages. ``exemplars``: their pixels, or the sizes of their files.
    ``values``: numbers that are stored with exemplars, such as logits. What is the same twice counts once, as it need
    not be stored again: a copy of the network that has not changed since, a frozen backbone in it. What training alone
    needs does not count: optimisers, gradients and activations.

    Args:
        learner: a learner between two tasks.
        images: those of its whole training set: uint8 (N, H, W, 3), or (N,) paths.
    """
    state = learner.state_dict()
    groups: dict[str, list[Tensor]] = defaultdict(list)  # by the names of the learner's attributes
    groups["network"] = []  # first: a copy of it is a further tensor
    for name, value in [*tensors_of(state).items(), *without_memory(state).items()]:
        groups[name.partition(".")[0]] += _tensors(value)
    network, *further = _without_copies(groups.values())
    try:
        exemplars = bytes_of(images[learner.memory.indices])
    except UserError:
        return None
    return {
        "network": _size(network),
        "further": sum(map(_size, further)),
        "exemplars": exemplars,
        "values": sum(rows["values"].nbytes for rows in stored_of(state).values()),
    }


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a part of a state, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _without_copies(groups: Iterable[list[Tensor]]) -> list[list[Tensor]]:
    """Each group without tensors that are in it twice, or whose values are in a group before it."""
    before: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = defaultdict(list)
    kept = []
    for group in groups:
        different = {(tensor.data_ptr(), tensor.shape): tensor for tensor in group if tensor.numel()}
        new = []
        for tensor in different.values():
            if not _is_among(tensor, before[tensor.dtype, tensor.shape]):
                new.append(tensor)
        for tensor in new:  # only now: equal tensors within a group are several
            before[tensor.dtype, tensor.shape].append(tensor)
        kept.append(new)
    return kept


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(torch.equal(tensor, other) for other in others)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
