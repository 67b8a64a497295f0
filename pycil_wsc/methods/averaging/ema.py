from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments


@register_learner("ema", epochs=70, milestones=[30, 50])
class EMA(Replay):
    """Replay, with an exponential moving average of the weights, which replaces them at the end of each task.

    After step n of a task, average <- d * average + (1 - d) * weights, with d the smaller of ``decay`` and
    n / (n + 9), so that the weights before the task do not outlast a short one. Statistics of batch norm are averaged
    too. The default decay is ours.
    """

    @dataclass(frozen=True)
    class Options:
        decay: float = key(0.999, "fraction of the average that each step keeps", low=0, below=1)

    plain_first_task = False
    averages = True

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.average: dict[str, Tensor] = {}  # averages of the task's weights and statistics; empty between tasks
        self.steps = 0  # optimiser steps in the task

    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        self.steps = 0
        self.average = {name: value.detach().clone() for name, value in self._averaged().items()}

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        decay = min(self.config.options.decay, self.steps / (self.steps + 9))
        torch._foreach_lerp_(list(self.average.values()), list(self._averaged().values()), 1 - decay)

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        torch._foreach_copy_(list(self._averaged().values()), list(self.average.values()))
        self.average = {}
        super().end_task(task)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"average": self.average, "steps": self.steps}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.average = self.placed(state["average"])
        self.steps = state["steps"]

    def _averaged(self):
        state = self.network.state_dict()
        return {name: value for name, value in state.items() if value.is_floating_point()}
