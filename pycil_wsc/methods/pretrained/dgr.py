from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.step.backward import Backward

LEAST = 1e-5  # of the cross-entropy's gradient: below, the distillation's is rounding, as in a task's first step


class PairedHead(IncrementalHead):
    """A head and a copy of its old rows through which the distillation reaches the features.

    So the head's gradient is that of the cross-entropy, and the copy's that of the distillation.
    """

    made_anew = ("copy_weight", "copy_bias")  # what each task makes anew

    def __init__(self, in_features: int, out_features: int = 0):
        super().__init__(in_features, out_features)
        self.copy_weight = nn.Parameter(torch.empty(0, in_features), requires_grad=False)
        self.copy_bias = nn.Parameter(torch.empty(0), requires_grad=False)

    @torch.no_grad()
    def grow(self, num_classes: int, in_features: int | None = None) -> None:
        if self.out_features:
            self.copy_weight = nn.Parameter(self.weight.clone())
            self.copy_bias = nn.Parameter(self.bias.clone())
        super().grow(num_classes, in_features)

    def old_logits(self, features: Tensor) -> Tensor:
        """(B, d) -> (B, old classes), by the copy."""
        return linear(features, self.copy_weight, self.copy_bias)

    @torch.no_grad()
    def renew(self) -> None:
        """Set the copy to the head's old rows."""
        old = len(self.copy_weight)
        self.copy_weight.copy_(self.weight[:old])
        self.copy_bias.copy_(self.bias[:old])


@register_learner(
    "dgr",
    init_epoch=20,
    epochs=20,
    init_lr=1e-3,
    lrate=1e-3,
    init_weight_decay=5e-4,
    weight_decay=5e-4,
    init_milestones=[],
    milestones=[],
    scheduler="cosine",
)
class DGR(DistillingLearner):
    """Dynamic gradient reweighting (He, CVPR 2024, https://arxiv.org/abs/2402.18528), for imbalanced classes.

    The head's gradient of each class is divided by what the class has received so far in the task, relative to the
    smallest; the gradient of the distillation gets the same norm as that of the cross-entropy. Logits are adjusted by
    the classes' frequencies.
    """

    @dataclass(frozen=True)
    class Options:
        lamda: float = key(1.0, "weight of the distillation, times old / new classes", low=0, decides="later tasks")
        gammar_r: float = key(
            1.0,
            "how much smaller the gradient of new classes is, the more classes are old",
            low=0,
            decides="later tasks",
        )
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")

    class Plan(DistillingLearner.Plan):
        needs_exemplars = True
        needs_new_classes = True

    received: Tensor  # the norms of the gradients of each class's weights, summed over the task: (classes,)
    prior: Tensor  # the logarithm of each class's frequency: (classes,)

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), PairedHead)

    def grow(self, task: Task) -> None:
        super().grow(task)
        for name in ("received", "prior"):
            self.register_buffer(name, torch.zeros(task.num_seen))

    def begin_task(self, task: Task) -> None:
        counts = np.bincount(self.manager.train_targets[self.batches.indices(task)], minlength=task.num_seen)
        self.prior.copy_(torch.from_numpy(np.log(np.maximum(counts, 1) / counts.sum())).float())
        self.received.zero_()

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        soft = self.teach(batch.images)
        features = self.network.extract(batch.images)
        logits = self.network.classify(features).float()
        loss = self.over.cross_entropy(logits + self.prior, batch.targets)
        if soft is None:
            return loss, logits
        options, new = self.config.options, self.num_seen - self.num_old
        old_logits = self.network.head.old_logits(features).float()
        distilled = distillation(old_logits, soft, options.T)
        return loss + options.lamda * self.num_old / new * distilled, logits

    @torch.no_grad()
    def after_backward(self, batch: Batch, backward: Backward) -> None:
        head, old = self.network.head, self.num_old
        norms = head.weight.grad.norm(dim=1)
        self.received += norms
        parts = [self.received[:old], self.received[old:]] if old else [self.received]
        weights = torch.cat([part.min() / part for part in parts])
        if old:
            balance = parts[1].mean() / parts[0].mean()
            damping = float(np.exp(-self.config.options.gammar_r * old / self.num_seen))
            weights[:old] *= balance.clamp(max=1)
            weights[old:] *= (balance * damping).clamp(max=1)
        head.weight.grad *= weights[:, None]
        head.bias.grad *= weights
        if not old:
            return
        norm = (weights * norms).norm()
        ratio = norm / torch.maximum(head.copy_weight.grad.norm(), LEAST * norm)
        head.weight.grad[:old] += ratio * head.copy_weight.grad
        head.bias.grad[:old] += ratio * head.copy_bias.grad
        head.copy_weight.grad = None
        head.copy_bias.grad = None

    def after_step(self) -> None:
        if self.num_old:
            self.network.head.renew()
