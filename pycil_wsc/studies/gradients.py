import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import widest_float
from pycil_wsc.registry import register_analysis
from pycil_wsc.studies.observer import Observer, Record, finite


@register_analysis("gradients")
class Gradients(Observer):
    """The mean gradients of new and past data at the start of a task's training, and their similarity.

    Records the paper's rho_t = <g_new, g_past> / (|g_new| |g_past|), and the norm of
    g = lambda g_new + (1 - lambda) g_past, where lambda is the fraction of new samples. The learning rate times this
    norm is the paper's parameter drift, which is bounded by the learning rate times |g_new|. Past data are the
    exemplars; without exemplars there is no rho. Gradients are those of the cross-entropy over all classes seen with
    respect to all trainable parameters, without augmentation and with batch norm in evaluation mode (so they are means
    over samples).
    """

    def task_started(self, task: Task) -> None:
        past = self.learner.memory.before(task)
        share = self.share_of_new(task)
        new = self.mean_gradient(task.train_indices)
        old = self.mean_gradient(past) if len(past) else None
        record = {
            "cosine": None,
            "norm_new": finite(new.norm().item()),
            "norm_past": None,
            "norm": finite(new.norm().item()),
        }
        if old is not None:
            cosine = (new @ old / (new.norm() * old.norm())).item()
            record |= {
                "cosine": finite(cosine),
                "norm_past": finite(old.norm().item()),
                "norm": finite((share * new + (1 - share) * old).norm().item()),
            }
        self.state["record"] = record

    def task_trained(self, task: Task) -> Record:
        return self.state["record"]

    def mean_gradient(self, indices: np.ndarray) -> Tensor:
        """The gradient of the mean loss over these training samples: (trainable parameters,), in the widest dtype.

        Of norm 0 if the loss depends on nothing that is trainable.
        """
        parameters = [p for p in self.learner.network.parameters() if p.requires_grad]
        dtype = widest_float(self.learner.device)
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=self.learner.device)
        for images, targets in self.shared_batches(indices) if parameters else ():
            loss = self.summed_loss(images, targets)
            if not loss.requires_grad:
                break
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
            total += torch.cat([gradient.reshape(-1) for gradient in gradients])
        return self.learner.processes.sum_(total) / len(indices)
