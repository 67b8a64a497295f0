from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.consolidation.scores import refusing_backbone
from pycil_wsc.methods.penalties.fisher import fisher_of_batches
from pycil_wsc.methods.penalties.penalising import PenalisingLearner, Weights
from pycil_wsc.registry import register_learner
from pycil_wsc.studies.diagonals import fisher_diagonal


@register_learner("ewc", epochs=180, milestones=[70, 120, 150], nme=False)
class EWC(PenalisingLearner):
    """Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017, https://arxiv.org/abs/1612.00796), as in PyCIL.

    The importance is the diagonal of the Fisher information, its mean over tasks weighted by their classes, whether
    or not these are new. PyCIL takes the squares of the gradients of whole batches, in training mode with
    augmentation; the paper, of samples.
    """

    @dataclass(frozen=True)
    class Options:
        lamda: float = key(1000.0, "weight of the penalty", low=0, decides="later tasks")
        fishermax: float = key(1e-4, "Fisher values are clipped to this maximum", low=0, decides="later tasks")
        fisher: str = key(
            "batches",
            "squares of the gradients of batches (`batches`, PyCIL's), or of single samples (`samples`)",
            choices=("batches", "samples"),
            decides="later tasks",
        )

    class Plan(PenalisingLearner.Plan):
        plain_first_task = False  # the pass after it moves the statistics of batch norm

        def check(self) -> str | None:
            if self.config.options.fisher == "samples" and self.config.grad_checkpointing:
                return "fisher: 'samples' does not work with grad_checkpointing; leave one of the two out"
            return super().check()

    @property
    def strength(self) -> float:
        return self.config.options.lamda / 2

    def new_importance(self, task: Task) -> Weights:
        options = self.config.options
        if options.fisher == "samples":
            fisher = self._of_samples(task)
        else:
            fisher = fisher_of_batches(self, task, task.train_indices, self.trained())
        return {name: value.clamp(max=options.fishermax) for name, value in fisher.items()}

    def combined(self, old: Tensor, new: Tensor, task: Task) -> Tensor:
        classes = len(np.unique(self.manager.train_targets[task.train_indices]))
        share = task.num_old / (task.num_old + classes)
        return share * old + (1 - share) * new

    @torch.enable_grad()
    def _of_samples(self, task):
        self.eval()
        batches = self.batches.plain(task.train_indices)
        with refusing_backbone("fisher", "samples", self.config.convnet_type):
            return dict(fisher_diagonal(self.network, self.trained(), batches))
