"""The parts of a learner's saved state, for those who read one without building the learner, and what hooks load.

:meth:`pycil_wsc.training.learner.BaseLearner.get_extra_state` writes what stands here.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.state import State
from pycil_wsc.training.step.cost import Spent

EXTRA = "_extra_state"  # torch's name in a module's ``state_dict()`` for what its ``get_extra_state()`` returned
MEMORY = "memory"
STORED = "stored"


def memory_of(state: State) -> State:
    """The state of the exemplar memory in a learner's ``state_dict()``."""
    return state[EXTRA][MEMORY]


def stored_of(state: State) -> State:
    """The state of the values that are stored with the exemplars, which those of 0.1.0 do not have."""
    return state[EXTRA].get(STORED, {})


def tensors_of(state: State) -> dict[str, Tensor]:
    """The tensors of the networks, by their names in the learner."""
    return {name: value for name, value in state.items() if name != EXTRA}


def parts_of(state: State) -> State:
    """What ``get_extra_state`` of a learner returned: all that is not a tensor of its networks."""
    return state[EXTRA]


def without_memory(state: State) -> State:
    """:func:`parts_of` without the memory and the values that are stored with it."""
    return {name: value for name, value in state[EXTRA].items() if name not in (MEMORY, STORED)}


def with_parts(state: State, **parts: State) -> State:
    """``state`` with other parts, such as another ``memory``; it is left as it is."""
    return {**state, EXTRA: {**state[EXTRA], **parts}}


def placed(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """``tensors`` on ``device``, such as those of a saved state."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class Started(Protocol):
    """A learner that has learned the first task."""

    spent: Spent

    @property
    def network(self) -> IncrementalNet: ...


def first_task_state(learner: Started) -> State:
    """The result of training the first task, in a form that every learner with the same backbone can load."""
    return {
        "tensors": _first_task_tensors(learner),
        "images_trained": learner.spent.images,
        "train_flops": learner.spent.operations,
    }


def load_first_task(learner: Started, state: State) -> None:
    """Load what :func:`first_task_state` returned for another learner."""
    for tensor, trained in zip(_first_task_tensors(learner), state["tensors"], strict=True):
        tensor.copy_(trained)
    learner.spent.images = state["images_trained"]
    learner.spent.operations = state["train_flops"]


def _first_task_tensors(learner: Started) -> list[Tensor]:
    return [tensor for part in learner.network.first_parts() for tensor in part.state_dict().values()]
