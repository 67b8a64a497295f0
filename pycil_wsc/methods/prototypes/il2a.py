from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pycil_wsc.data.batches.epoch_order import WHOLE, Share, batch_slices
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.prototypical import PYCIL, PrototypeLearner
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import Phase


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

    network: PairNet

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

    def build(self) -> "PairNet":
        return PairNet(self.new_backbone())

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            options, augmentation = self.config.options, self.config.augmentation
            mixing = options.mixtures, options.mixture_alpha, options.mixture_low
            source = MixingSource(self.batches.source, task.num_old, task.num_seen, *mixing, augmentation)
            yield replace(phase, source=source)

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
        errors = torch.cat([self.over.weighted(errors[: len(batch)]), errors[len(batch) :]])
        loss = self.over.mean(errors, torch.ones_like(errors, dtype=torch.bool), batch)
        if before is not None:
            distance = self.over.norm((features - before).float(), batch)
            loss = loss + options.lambda_fkd * distance + options.lambda_proto * self.prototype_loss(*chosen)
        return loss, logits[: len(batch), : self.num_seen]

    def prototype_loss(self, chosen: Tensor) -> Tensor:
        """The upper bound of the cross-entropy of the distributions of the old classes ``chosen`` (n,)."""
        logits = self.network.head(self.prototypes[chosen]).float()
        weight = self.network.head.weight
        difference = weight - weight[chosen][:, None]  # (n, classes, d)
        spread = ((difference @ self.covariances[chosen]) * difference).sum(2)
        return self.scaled_cross_entropy(logits + self.config.options.ratio / 2 * spread, chosen, weighted=False)

    def keep(self, label: int, features: np.ndarray) -> None:
        super().keep(label, features)
        if len(features) > 1:
            self.covariances[label] = torch.from_numpy(np.cov(features.T).astype(np.float32))


@dataclass(frozen=True)
class MixingSource:
    """Batches of ``source`` with mixtures: (images, targets, mixed float32 (M, 3, H, W), their classes int64 (M,)).

    Each image is mixed ``rounds`` times with a random one of its batch, if both classes are new and differ. The pair of
    the new classes i > j, counted from 0, is the class ``seen + i (i - 1) / 2 + j``.

    Args:
        source: of the images.
        old: the number of old classes; no image of theirs is mixed.
        seen: the number of old and new classes.
        rounds: how often each image is mixed.
        alpha: the weights of the two images are drawn from a beta distribution with these two parameters.
        low: weights below it, and above 1 minus it, are replaced by one half.
        augmentation: of the images.
    """

    source: Source
    old: int
    seen: int
    rounds: int
    alpha: float
    low: float
    augmentation: str | None = None

    def batches(
        self,
        indices: np.ndarray,
        targets: np.ndarray,
        batch_size: int,
        *,
        train: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        share: Share = WHOLE,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield batches of one epoch, in the order of ``indices``. Mixtures are those of whole batches, whose images
        are all loaded.
        """
        if shuffle:
            raise ValueError("the order of the samples is that of the indices")
        rng = np.random.default_rng([seed, 3])
        drawn = [self.pairs(targets[indices[part]], rng) for part in batch_slices(len(indices), batch_size, train)]
        ends = np.cumsum([len(batch[0]) for batch in drawn])
        columns = [np.concatenate(column) for column in zip(*drawn)]
        first, second, classes, weights = (torch.from_numpy(column).to(self.source.device) for column in columns)
        whole = self.source.batches(
            indices, targets, batch_size, train=train, seed=seed, shuffle=False, augmentation=self.augmentation
        )
        for number, ((images, labels), end) in enumerate(zip(whole, ends.tolist(), strict=True)):
            of_share = slice(end - len(drawn[number][0]), end)
            weight = weights[of_share, None, None, None]
            mixed = weight * images[first[of_share]] + (1 - weight) * images[second[of_share]]
            rows = share.rows(number)
            if rows is not None:
                yield images[rows], labels[rows], mixed[rows], classes[of_share][rows]

    def pairs(self, targets: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """The positions of both images, the class and the weight of the first image of each mixture: all (M,)."""
        places = np.arange(len(targets))
        first = np.tile(places, self.rounds)
        second = np.concatenate([places[:0], *(rng.permutation(places) for _ in range(self.rounds))])
        weights = rng.beta(self.alpha, self.alpha, len(first))
        weights[(weights < self.low) | (weights > 1 - self.low)] = 0.5
        large = np.maximum(targets[first], targets[second]) - self.old
        small = np.minimum(targets[first], targets[second]) - self.old
        mixed = (large != small) & (small >= 0)
        classes = self.seen + large * (large - 1) // 2 + small
        return first[mixed], second[mixed], classes[mixed], weights[mixed].astype(np.float32)
