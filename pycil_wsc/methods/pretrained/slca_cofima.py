from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.consolidation.model_merging import fisher_mean
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.penalties.fisher import fisher_of_batches
from pycil_wsc.methods.pretrained.slca import AS_PILOT, SLCA
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed


@register_learner("slca_cofima", **AS_PILOT)
class SLCACoFiMA(SLCA):
    """CoFiMA (Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977) as its authors train it: with SLCA.

    theta <- ((1 - a) F_before theta_before + a F theta) / ((1 - a) F_before + a F) for the backbone, after the training
    of each later task and before the head is aligned; the next task starts from it. F is the diagonal of the Fisher
    information of the task's images, over all classes: squares of the gradients of batches, cut off at ``fishermax``.
    The head is not averaged: its old rows do not change, and the new ones have no earlier values.
    """

    @dataclass(frozen=True)
    class Options(SLCA.Options):
        new_weight: float = key(0.4, "weight of the new task", low=0, high=1, decides="later tasks")
        fisher_weighting: bool = key(True, "weights by Fisher information; false: a plain mean", decides="later tasks")
        fishermax: float = key(1e-4, "Fisher values are clipped to this maximum", low=0, decides="later tasks")

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.before: dict[str, Tensor] = {}  # the backbone after the previous task
        self.fisher: dict[str, Tensor] = {}  # its Fisher information there

    def _before_alignment(self, task: Task) -> None:
        super()._before_alignment(task)
        self.average(task)

    def average(self, task: Task) -> None:
        """Average the backbone with that after the previous task."""
        options, backbone = self.config.options, self.network.backbone
        parameters = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
        earlier = self.fisher
        if options.fisher_weighting:
            fisher = fisher_of_batches(self, task, self.plan.new_samples(task, self.manager.train_targets), parameters)
            self.fisher = {name: value.clamp(max=options.fishermax) for name, value in fisher.items()}
        with torch.no_grad():
            for name, parameter in parameters.items() if task.index else ():
                before = self.before[name]
                if options.fisher_weighting:
                    mean = fisher_mean(before, parameter, options.new_weight, earlier[name], self.fisher[name])
                else:
                    mean = torch.lerp(before, parameter, options.new_weight)
                parameter.copy_(mean)
            self.before = {name: value.detach().clone() for name, value in parameters.items()}
        self.outputs.recompute_batch_norm(task)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"before": self.before, "fisher": self.fisher}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.before = placed(state["before"], self.device)
        self.fisher = placed(state["fisher"], self.device)
