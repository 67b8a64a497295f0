"""What the training loop uses of a learner: :class:`pycil_wsc.training.learner.BaseLearner`, without importing it."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.training.batches import Batch, Batches
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.over import Over
from pycil_wsc.training.phase import Phase, PhaseRun
from pycil_wsc.training.plan import Plan
from pycil_wsc.training.precision import Precision
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.step.cost import Spent


class Trainable(Protocol):
    """A learner, as the loop sees it."""

    config: LearnerConfig
    manager: TaskSequence
    memory: ExemplarMemory
    processes: Processes
    device: torch.device
    batches: Batches
    over: Over
    precision: Precision
    spent: Spent
    plan: Plan

    # the hooks that the loop calls
    def phases(self, task: Task) -> Iterator[Phase]: ...
    def begin_phase(self, task: Task, run: PhaseRun) -> None: ...
    def end_phase(self, task: Task, run: PhaseRun) -> None: ...
    def before_step(self, batch: Batch) -> Batch: ...
    def to_store(self, batch: Batch, logits: Tensor) -> dict[str, Tensor]: ...
    def after_backward(self, batch: Batch, backward: Any) -> None: ...
    def after_step(self) -> None: ...
    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None: ...

    # what a budget is planned from
    def new_backbone(self, pretrained: bool | str | None = None) -> Backbone: ...

    # of a module
    def buffers(self) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def eval(self) -> object: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
