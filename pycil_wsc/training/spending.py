"""What a task has spent of its budget: a part of a learner's state."""

from pycil_wsc.state import State


class Spending:
    """The phases of the current task that have begun, and its seconds of training: a part of a learner's state."""

    def __init__(self) -> None:
        self.task = -1
        self.begun: list[dict[str, float]] = []  # for each phase: what was spent before it, and its own images
        self.seconds = 0.0  # seconds of training in all phases of the task

    def in_phase(self) -> float:
        """The seconds of training in the latest phase, up to its last whole epoch."""
        return self.seconds - self.begun[-1]["seconds"]

    def state_dict(self) -> State:
        return {"task": self.task, "begun": [dict(each) for each in self.begun], "seconds": self.seconds}

    def load_state_dict(self, state: State) -> None:
        self.task, self.seconds = state["task"], state["seconds"]
        self.begun = [dict(each) for each in state["begun"]]
