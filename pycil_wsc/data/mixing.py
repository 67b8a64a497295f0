"""Mixtures of images of two classes (Zhang et al., 2018) as further classes, beside the images of each batch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.loader import Source
from pycil_wsc.data.order import WHOLE, Share, batch_slices


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
        first, second, classes, weights = (torch.from_numpy(each).to(self.source.device) for each in columns)
        whole = self.source.batches(
            indices, targets, batch_size, train=train, seed=seed, shuffle=False, augmentation=self.augmentation
        )
        for number, ((images, labels), end) in enumerate(zip(whole, ends.tolist(), strict=True)):
            mine = slice(end - len(drawn[number][0]), end)
            weight = weights[mine, None, None, None]
            mixed = weight * images[first[mine]] + (1 - weight) * images[second[mine]]
            rows = share.rows(number)
            if rows is not None:
                yield images[rows], labels[rows], mixed[rows], classes[mine][rows]

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
