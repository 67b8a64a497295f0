from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase


@register_learner("simplecil", convnet_type="cosine_resnet32", init_lr=0.01, scheduler="cosine", nme=False)
class SimpleCIL(BaseLearner):
    """SimpleCIL (Zhou et al., IJCV 2024): the backbone learns the first task; a class is then its mean feature.

    As in PyCIL the network starts from random weights. It needs no memory, and later tasks train nothing. A pre-trained
    backbone stays as it is, as in PILOT.
    """

    @dataclass(frozen=True)
    class Options:
        adapt: bool | None = key(
            None,
            "train the backbone on the first task, for `init_epoch` epochs; null: if it is not `pretrained`",
            before=True,  # it always was
        )

    class Plan(BaseLearner.Plan):
        uses_memory = False
        one_phase = False
        epoch_keys = ()

        @property
        def adapts(self) -> bool:
            """Whether the first task trains the backbone."""
            adapt = self.config.options.adapt
            return not self.config.pretrained if adapt is None else adapt

        def planned_epochs(self, task: Task) -> int:
            return self.config.init_epoch if not task.index and self.adapts else 0

    plan: Plan

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), CosineHead)

    def phases(self, task: Task) -> Iterator[Phase]:
        if not task.index and self.plan.adapts:
            yield self.main_phase(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits.float(), batch.targets), logits

    def end_task(self, task: Task) -> None:
        self.set_prototypes(task)

    @torch.no_grad()
    def set_prototypes(self, task: Task) -> None:
        """Set the head's rows of the task's classes to the mean features of their training images."""
        features = torch.from_numpy(self.outputs.features(task.train_indices))
        targets = self.manager.train_targets[task.train_indices]
        for label in np.unique(targets):
            mean = features[torch.from_numpy(targets == label)].mean(0)
            self.network.head.weight[label] = mean.to(self.device)

    def classify(self, features: Tensor) -> Tensor:
        """In fp32, whatever the precision: many cosines are equal in bf16."""
        with self.precision.full(features.device):
            return self.network.classify(features.float())
