import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.methods.pretrained.simplecil import SimpleCIL
from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.layers import eval_frozen
from pycil_wsc.networks.nets import Backbone, IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase


@register_learner(
    "aper_finetune",
    convnet_type="cosine_resnet32",
    init_epoch=200,
    init_milestones=[],
    init_lr=0.01,
    init_weight_decay=0.05,
    epochs=20,
    milestones=[],
    lrate=0.005,
    weight_decay=0.05,
    min_lr=1e-8,
    scheduler="cosine",
    nme=False,
)
class APERFinetune(SimpleCIL):
    """APER with finetuning (Zhou et al., IJCV 2024): prototypes in the features of two networks.

    One has learned the first task. The other is a copy that was tuned on the second task's classes alone. As in PyCIL
    both start from random weights. A pre-trained backbone stays as it is, and its copy is tuned on the first task, as
    in PILOT.
    """

    class Plan(SimpleCIL.Plan):
        epoch_keys = ("epochs",)

        @property
        def tuned_task(self) -> int:
            """The index of the task that tunes the copy."""
            return 1 if self.adapts else 0

        def planned_epochs(self, task: Task) -> int:
            epochs = self.config.epochs if task.index else self.config.init_epoch
            return epochs if task.index <= self.tuned_task else 0

    network: "TwoBranchNet"
    plan: Plan

    def build(self) -> "TwoBranchNet":
        return TwoBranchNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        if task.index == self.plan.tuned_task:
            self.network.branch(task.num_seen)
        super().grow(task)
        self.first = self.manager.first_class(task)

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.network.head.scale.data.fill_(1)  # PyCIL's head for two branches is a new one

    def phases(self, task: Task) -> Iterator[Phase]:
        if not task.index and self.plan.adapts:
            yield self.main_phase(task)
        if task.index == self.plan.tuned_task:
            tuned = self.network.tuned
            assert tuned is not None
            yield replace(self.main_phase(task, tuned.parameters()), network=tuned, loss=self.tuning_loss)

    def tuning_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the classes of the task."""
        assert self.network.tuned is not None
        logits = self.network.tuned(batch.images)
        return self.over.cross_entropy(logits[:, self.first :].float(), batch.targets - self.first), logits


class Branch(nn.Sequential):
    """A backbone and a head, whose frozen parts stay in evaluation mode."""

    def train(self, mode: bool = True) -> "Branch":
        super().train(mode)
        eval_frozen(self)
        return self


class TwoBranchNet(IncrementalNet):
    """A backbone that stays as the first task left it, beside a copy that the second task tunes.

    From the second task on the features are those of both, (B, 2 d).
    """

    def __init__(self, backbone: Backbone):
        super().__init__(backbone, CosineHead)
        self.tuned: Branch | None = None  # the copy, and the head it is tuned with

    @torch.no_grad()
    def branch(self, classes: int) -> None:
        """Add the second branch, with a new head of ``classes`` rows; the prototypes so far stand for both branches."""
        self.tuned = Branch(copy.deepcopy(self.backbone), CosineHead(self.backbone.out_dim, classes))
        self.backbone.requires_grad_(False)
        self.head.weight = nn.Parameter(self.head.weight.repeat(1, 2))

    def depths(self) -> dict[nn.Parameter, int]:
        distances = super().depths()
        return distances if self.tuned is None else distances | layers.depths([self.tuned[0]])

    def extract(self, images: Tensor) -> Tensor:
        features = self.backbone(images)
        return features if self.tuned is None else torch.cat([features, self.tuned[0](images)], 1)
