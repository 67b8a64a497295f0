"""The base class of learners that penalise changes of the weights that were important to earlier tasks."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.methods.replay.finetune import Finetune
from pycil_wsc.networks.heads import part_of
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed

Weights = dict[str, Tensor]  # name of a parameter -> values


class PenalisingLearner(Finetune):
    """Finetune, plus ``strength`` times the squared distance from the weights after the previous task, each weighted by
    its importance. A method says what ``new_importance`` of a task is, and how it is ``combined`` with the old one.
    """

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.importance: Weights = {}
        self.anchor: Weights = {}  # the weights after the previous task; the head may have grown since

    @property
    def strength(self) -> float:
        raise NotImplementedError

    def new_importance(self, task: Task) -> Weights:
        """The importance of each trained parameter to ``task``, which has just been learned."""
        raise NotImplementedError

    def combined(self, old: Tensor, new: Tensor, task: Task) -> Tensor:
        """The importance to all tasks so far, from that to the earlier ones and that to ``task``."""
        return old + new

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, logits = super().loss(batch)
        if self.importance:
            loss = loss + self.strength * self.penalty()
        return loss, logits

    def penalty(self) -> Tensor:
        """The weighted squared distance from the weights after the previous task."""
        total = torch.zeros((), device=self.device)
        for name, parameter in self.trained().items():
            if name in self.importance:
                anchor = self.anchor[name]
                total = total + (self.importance[name] * (part_of(parameter, anchor) - anchor).square()).sum()
        return total

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        importance = self.new_importance(task)
        for name, old in self.importance.items():
            if name in importance:
                new = part_of(importance[name], old)
                new.copy_(self.combined(old, new, task))
        self.importance = importance
        self.anchor = {name: parameter.detach().clone() for name, parameter in self.trained().items()}

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"importance": self.importance, "anchor": self.anchor}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.importance = placed(state["importance"], self.device)
        self.anchor = placed(state["anchor"], self.device)
