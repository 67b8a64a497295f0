from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.penalties.penalising import PenalisingLearner, Weights
from pycil_wsc.networks.heads import part_of
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed
from pycil_wsc.training.step.backward import Backward


@register_learner("si", epochs=180, milestones=[70, 120, 150], nme=False)
class SI(PenalisingLearner):
    """Synaptic Intelligence (Zenke et al., ICML 2017, https://arxiv.org/abs/1703.04200).

    The importance of a weight is the reduction of the loss along its path in the task, divided by the squared distance
    that it moved, and is summed over tasks. A negative sum counts as 0, as in the authors' code. The schedule is that
    of PyCIL's EWC.
    """

    @dataclass(frozen=True)
    class Options:
        c: float = key(
            0.1,
            "weight of the penalty (0.1 is among the values that the authors' code tries)",
            low=0,
            decides="later tasks",
        )
        xi: float = key(
            0.1,
            "added to the squared distance (in the authors' code 0.1 for permuted MNIST, 0.001 for CIFAR)",
            above=0,
            decides="later tasks",
        )

    class Plan(PenalisingLearner.Plan):
        plain_first_task = False  # its path is needed

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.path: Weights = {}  # by how much each weight's steps have reduced the loss; empty between tasks
        self.start: Weights = {}  # the weights before the task; empty between tasks
        # for each parameter: name, parameter, its gradient, its value before the step
        self.step: list[tuple[str, nn.Parameter, Tensor, Tensor]] = []

    @property
    def strength(self) -> float:
        return self.config.options.c

    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        self.path = {name: torch.zeros_like(parameter) for name, parameter in self.trained().items()}
        self.start = {name: parameter.detach().clone() for name, parameter in self.trained().items()}

    @torch.no_grad()
    def after_backward(self, batch: Batch, backward: Backward) -> None:
        """Remember the gradients of the loss without the penalty, and the weights."""
        self.step.clear()
        for name, parameter in self.trained().items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.clone()
            if name in self.importance:
                anchor = self.anchor[name]
                distance = part_of(parameter, anchor) - anchor
                part_of(gradient, anchor).sub_(2 * self.strength * self.importance[name] * distance)
            self.step.append((name, parameter, gradient, parameter.clone()))

    @torch.no_grad()
    def after_step(self) -> None:
        for name, parameter, gradient, before in self.step:
            self.path[name] -= gradient * (parameter - before)

    def new_importance(self, task: Task) -> Weights:
        xi = self.config.options.xi
        importance = {}
        for name, parameter in self.trained().items():
            distance = parameter - self.start[name]
            importance[name] = self.path[name] / (distance.square() + xi)
        self.step.clear()
        return importance

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.path = {}
        self.start = {}
        for value in self.importance.values():
            value.clamp_(min=0)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"path": self.path, "start": self.start}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.path = placed(state["path"], self.device)
        self.start = placed(state["start"], self.device)
