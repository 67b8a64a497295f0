"""Where the parts of a learner's saved state are, for those who read one without building the learner.

:meth:`pycil_wsc.training.learner.BaseLearner.get_extra_state` writes what stands here.
"""

from pycil_wsc.files import Json
from pycil_wsc.state import State

EXTRA = "_extra_state"  # torch's name in a module's ``state_dict()`` for what its ``get_extra_state()`` returned
MEMORY = "memory"
STORED = "stored"


def memory_of(state: State) -> State:
    """The state of the exemplar memory in a learner's ``state_dict()``."""
    return state[EXTRA][MEMORY]


def stored_of(state: State) -> State:
    """The state of the values that are stored with the exemplars."""
    return state[EXTRA][STORED]


def without_exemplars(state: State) -> list[tuple[str, Json]]:
    """What else there is, with its names: the tensors of the networks, then the learner's other parts."""
    tensors = [(name, value) for name, value in state.items() if name != EXTRA]
    parts = [(name, value) for name, value in state[EXTRA].items() if name not in (MEMORY, STORED)]
    return tensors + parts
