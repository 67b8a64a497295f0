from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pycil_wsc.data.mixing import MixingSource
from pycil_wsc.data.tasks import Task
from pycil_wsc.engine.batch import Batch
from pycil_wsc.engine.phase import Phase
from pycil_wsc.keys import key
from pycil_wsc.learners.base import Arguments
from pycil_wsc.learners.prototypical import PYCIL, PrototypeLearner
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, IncrementalNet
from pycil_wsc.registry import register_learner


class PairNet(IncrementalNet):
    """Beside the head, a new one in each task that has a row for each pair of its new classes."""

    def __init__(self, backbone: Backbone):
        super().__init__(backbone)
        self.pair_head = IncrementalHead(backbone.out_dim)

    def grow(self, num_classes: int) -> None:
        new = num_classes - self.head.out_features
        super().grow(num_classes)
        self.pair_head = IncrementalHead(self.backbone.out_dim, new * (new - 1) // 2)

    def classify_pairs(self, features: Tensor) -> Tensor:
        """(B, d) features -> (B, classes + pairs) logits."""
        return torch.cat([self.head(features), self.pair_head(features)], 1)


@register_learner(
    "il2a", **PYCIL, batch_size=64, convnet_type="resnet18_cbam", init_weight_decay=2e-4, weight_decay=2e-4
)
class IL2A(PrototypeLearner):
    """IL2A (Zhu et al., NeurIPS 2021): class augmentation and semantic augmentation.

    Mixtures of two new classes are further classes while the task is learned. An old class is a normal distribution of
    features with the mean and covariance of its images' features; the cross-entropy's upper bound over it is trained.
    """

    @dataclass(frozen=True)
    class Options(PrototypeLearner.Options):
        ratio: float = key(2.5, "strength of the semantic augmentation", low=0, decides="later tasks")
        mixtures: int = key(4, "number of mixtures per image", low=0)
        mixture_alpha: float = key(20.0, "both parameters of the beta distribution of the mixtures' weights", above=0)
        mixture_low: float = key(
            0.4, "weights of mixtures below it, and above 1 minus it, are replaced by one half", low=0, high=0.5
        )

    two_passes = True
    covariances: Tensor  # of the features of each class: (classes, d, d)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        width = self.network.backbone.out_dim
        self.register_rows("covariances", width, width)

    def build(self) -> nn.Module:
        return PairNet(self.new_backbone())

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            options, augmentation = self.config.options, self.config.augmentation
            mixing = options.mixtures, options.mixture_alpha, options.mixture_low
            phase.source = MixingSource(self.train_source, task.num_old, task.num_seen, *mixing, augmentation)
            yield phase

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options = self.config.options
        *chosen, mixed, pairs = batch.drawn
        images = torch.cat([batch.images, mixed])
        targets = torch.cat([batch.targets, pairs])
        before = self.old_features(images)
        features = self.network.extract(images)
        logits = self.network.classify_pairs(features).float()
        smoothing = self.config.label_smoothing
        errors = cross_entropy(logits / options.temp, targets, reduction="none", label_smoothing=smoothing)
        loss = self.mean_over(errors, torch.ones_like(errors, dtype=torch.bool), batch)
        if before is not None:
            distance = self.norm_over((features - before).float(), batch)
            loss = loss + options.lambda_fkd * distance + options.lambda_proto * self.prototype_loss(*chosen)
        return loss, logits[: len(batch), : self.num_seen]

    def prototype_loss(self, chosen: Tensor) -> Tensor:
        """The upper bound of the cross-entropy of the distributions of the old classes ``chosen`` (n,)."""
        logits = self.network.head(self.prototypes[chosen]).float()
        weight = self.network.head.weight
        difference = weight - weight[chosen][:, None]  # (n, classes, d)
        spread = ((difference @ self.covariances[chosen]) * difference).sum(2)
        return self.scaled_cross_entropy(logits + self.config.options.ratio / 2 * spread, chosen)

    def keep(self, label: int, features: np.ndarray) -> None:
        super().keep(label, features)
        if len(features) > 1:
            self.covariances[label] = torch.from_numpy(np.cov(features.T).astype(np.float32))
