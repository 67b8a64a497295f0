from dataclasses import dataclass

from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.consolidation.model_merging import fisher_mean
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.averaging.merging_learner import InterpolatingLearner, Weights
from pycil_wsc.methods.penalties.fisher import fisher_of_batches
from pycil_wsc.networks.heads import part_of
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.learner_state import placed


@register_learner("cofima", epochs=70, milestones=[30, 50])
class CoFiMA(InterpolatingLearner):
    """Continual Fisher-weighted model averaging (Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977), with
    Replay.

    theta <- ((1 - a) F_before theta_before + a F theta) / ((1 - a) F_before + a F) at the end of each later task, from
    which the next starts. F is the diagonal of the Fisher information of the task's training data, exemplars included,
    as in the authors' code: squares of the gradients of batches, cut off at ``fishermax``, before the weights are
    averaged. Unlike theirs, it has no low rate for the backbone, no loss over the new classes alone, and no second
    stage.
    """

    @dataclass(frozen=True)
    class Options:
        new_weight: float = key(
            0.4, "weight of the new task (0.4 in the authors' file for CIFAR-100)", low=0, high=1, decides="later tasks"
        )
        fishermax: float = key(1e-4, "Fisher values are clipped to this maximum", low=0, decides="later tasks")

    class Plan(InterpolatingLearner.Plan):
        plain_first_task = False  # the pass after it moves the statistics of batch norm

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.fisher: Weights = {}  # the last task's Fisher information
        self.earlier: Weights = {}  # that of the previous task, while the weights are merged

    def end_task(self, task: Task) -> None:
        fisher = fisher_of_batches(self, task, self.batches.indices(task), dict(self.network.named_parameters()))
        self.earlier = self.fisher
        self.fisher = {name: value.clamp(max=self.config.options.fishermax) for name, value in fisher.items()}
        super().end_task(task)
        self.earlier = {}

    def merged(self, name: str, before: Tensor, now: Tensor) -> Tensor:
        earlier = self.earlier[name]
        new = part_of(self.fisher[name], before)
        return fisher_mean(before, now, self.config.options.new_weight, earlier, new)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"fisher": self.fisher}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.fisher = placed(state["fisher"], self.device)
