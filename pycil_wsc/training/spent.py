"""What a learner's training has cost so far: a part of its state."""

from pycil_wsc.state import State


class Spent:
    """Training images and operations of all tasks, and what the phases of the current task began with.

    Attributes:
        images: training images, over all epochs.
        operations: floating-point operations.
        per_image: operations per image of the current phase; None before they are counted.
        per_exemplar: those per exemplar of a batch, before a step; likewise.
        replays: whether the counted step has replayed images beside its batch.
        task: the task of ``begun``.
        begun: for each of its phases that has begun, the ``operations`` before it, the planned ``images`` of the phases
            before it, and its ``own``.
    """

    def __init__(self) -> None:
        self.images = 0
        self.operations = 0
        self.per_image: int | None = None
        self.per_exemplar: int | None = None
        self.replays = False
        self.task = -1
        self.begun: list[dict[str, float]] = []

    def state_dict(self) -> State:
        return {"task": self.task, "begun": [dict(phase) for phase in self.begun], "replays": self.replays}

    def load_state_dict(self, state: State) -> None:
        self.task = state["task"]
        self.begun = [dict(phase) for phase in state["begun"]]
        self.replays = state.get("replays", False)  # missing in states of earlier versions
