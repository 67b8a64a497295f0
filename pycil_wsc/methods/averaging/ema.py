from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed


@register_learner("ema", epochs=70, milestones=[30, 50])
class EMA(Replay):
    """Replay, with an exponential moving average of the weights, which replaces them at the end of each task.

    With d the ``decay``, the average after step n of a task is the sum over its steps i of d^(n-i) (1 - d) w_i, divided
    by the sum of these shares, 1 - d^n. This division is Adam's correction of the bias: the weights before the task
    have no share. Statistics of batch norm are averaged too. The default decay is ours.
    """

    @dataclass(frozen=True)
    class Options:
        decay: float = key(
            0.999,
            "what each further step multiplies the share of an earlier step's weights by; the average is over about "
            "1 / (1 - `decay`) steps",
            low=0,
            below=1,
        )

    class Plan(Replay.Plan):
        plain_first_task = False
        averages = True

        def time_constants(self, network: nn.Module) -> dict[str, float]:
            return {"decay": 1 / (1 - self.config.options.decay)}

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
        decay = self.config.options.decay
        newest = (1 - decay) / (1 - decay**self.steps)  # the share of these weights; 1 after the first step
        torch._foreach_lerp_(list(self.average.values()), list(self._averaged().values()), newest)

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        torch._foreach_copy_(list(self._averaged().values()), list(self.average.values()))
        self.average = {}
        super().end_task(task)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"average": self.average, "steps": self.steps}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.average = placed(state["average"], self.device)
        self.steps = state["steps"]

    def _averaged(self):
        state = self.network.state_dict()
        return {name: value for name, value in state.items() if value.is_floating_point()}
