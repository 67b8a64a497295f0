from dataclasses import dataclass

import torch

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.penalties.penalising import PenalisingLearner, Weights
from pycil_wsc.registry import register_learner


@register_learner("mas", epochs=180, milestones=[70, 120, 150], nme=False)
class MAS(PenalisingLearner):
    """Memory Aware Synapses (Aljundi et al., ECCV 2018, https://arxiv.org/abs/1711.09601).

    The importance of a weight is how much the squared norm of the logits depends on it: absolute gradients of whole
    batches, as in the authors' code, in evaluation mode, so that it depends on ``batch_size``. It adds up over tasks.
    The weight 1 of the penalty is that of the authors' code for object recognition; the schedule is that of PyCIL's
    EWC.
    """

    @dataclass(frozen=True)
    class Options:
        lamda: float = key(1.0, "weight of the penalty", low=0, decides="later tasks")

    @property
    def strength(self) -> float:
        return self.config.options.lamda

    @torch.enable_grad()
    def new_importance(self, task: Task) -> Weights:
        parameters = self.trained()
        importance = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.eval()
        share = self.processes.share_of_batches
        for images, _ in self.batches.plain(task.train_indices, share=share):
            with self.precision.autocast():
                logits = self.network(images)
            norms = logits.float().square().sum()
            gradients = torch.autograd.grad(norms, list(parameters.values()), allow_unused=True)
            for value, gradient in zip(importance.values(), gradients):
                if gradient is not None:
                    value += gradient.abs() / len(task.train_indices)
        for value in importance.values():
            self.processes.sum_(value)
        return importance
