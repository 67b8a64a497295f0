"""The base classes of learners that merge the weights of several tasks at the end of each."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.consolidation.model_merging import Merge
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.heads import part_of
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed

Weights = dict[str, Tensor]  # name of a parameter -> values


class MergingLearner(Replay):
    """Replay, whose weights are merged with earlier ones at the end of each later task.

    The first task is plain. Statistics of batch norm do not belong to merged weights, so they are collected anew in one
    pass over the task's training data. A consolidation comes first: its average is what is merged.
    """

    def merge(self, task: Task) -> None:
        """Replace the weights after ``task``, which is not the first, by the merged ones. Builds no graph."""
        raise NotImplementedError

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        super().end_task(task)
        if task.index:
            self.merge(task)
            self.outputs.recompute_batch_norm(task)


class InterpolatingLearner(MergingLearner):
    """Each parameter is merged with its value before the task, from which the task started.

    Rows of the head that are new have no such value and stay as they were trained.
    """

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.before: Weights = {}  # the weights after the previous task; the head may have grown since

    def merged(self, name: str, before: Tensor, now: Tensor) -> Tensor:
        """The mean of a parameter's values before and after the task, which have one shape."""
        raise NotImplementedError

    def merge(self, task: Task) -> None:
        for name, parameter in self.network.named_parameters():
            before = self.before[name]
            now = part_of(parameter, before)
            now.copy_(self.merged(name, before, now))

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.before = {name: parameter.detach().clone() for name, parameter in self.network.named_parameters()}

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"before": self.before}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.before = placed(state["before"], self.device)


class TaskVectorLearner(MergingLearner):
    """The backbone's changes in all later tasks are merged, relative to its weights after the first task.

    These stand for the pretrained model of the literature, whose head is fixed: the head is not merged. The merged
    network is tested and chooses exemplars, while the next task starts from the weights that were trained.
    """

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.start: Weights = {}  # the backbone's after the first task
        self.merging: Merge | None = None
        self.trained: Weights = {}  # the backbone's weights and statistics, while it has the merged ones

    def new_merge(self, start: Mapping[str, Tensor]) -> Merge:
        """The merge of the changes from ``start`` on."""
        raise NotImplementedError

    @torch.no_grad()
    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        state = self.network.backbone.state_dict()
        for name, trained in self.trained.items():
            state[name].copy_(trained)
        self.trained = {}

    def merge(self, task: Task) -> None:
        assert self.merging is not None
        self.trained = {name: value.clone() for name, value in self.network.backbone.state_dict().items()}
        self.merging.update(self._weights())
        merged = self.merging.result()
        for name, parameter in self._weights().items():
            parameter.copy_(merged[name])

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        super().end_task(task)
        if not task.index:
            self._merge_from({name: value.clone() for name, value in self._weights().items()})

    def get_extra_state(self) -> State:
        merging = self.merging.state_dict() if self.merging else {}
        return super().get_extra_state() | {"start": self.start, "merging": merging, "trained": self.trained}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.trained = placed(state["trained"], self.device)
        if state["start"]:
            self._merge_from(placed(state["start"], self.device)).load_state_dict(placed(state["merging"], self.device))

    def _merge_from(self, start: Weights) -> Merge:
        self.start = start
        self.merging = self.new_merge(start)
        return self.merging

    def _weights(self) -> Weights:
        return {name: parameter.detach() for name, parameter in self.network.backbone.named_parameters()}
