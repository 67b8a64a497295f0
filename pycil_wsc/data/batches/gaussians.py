"""Features that are drawn anew in each epoch, for methods that train a classifier on what they know of each class."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.batches.epoch_order import WHOLE, Share, batch_slices


class GaussianSource:
    """Rows drawn from normal distributions in place of images, in equal numbers from each, as batches of a phase.

    Args:
        means: (n, d), one for each distribution.
        roots: (n, d, d), lower triangular, of which each times its transpose is a covariance; or standard deviations
            (n, d).
        labels: int64 (n,), the class of each distribution.
        rows: how many are drawn from each distribution.
        device: where they are drawn.
    """

    def __init__(self, means: Tensor, roots: Tensor, labels: Tensor, rows: int, device: torch.device) -> None:
        self.means, self.roots, self.labels = (tensor.to(device) for tensor in (means, roots, labels))
        self.rows = rows
        self.device = device

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
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of one epoch: rows (B, d) and their classes int64 (B,), on the device.

        ``seed`` decides which rows are drawn and in what order. Of all rows there are as many as ``indices``, whose
        values do not matter, nor do ``targets``.
        """
        generator = torch.Generator(self.device)
        generator.manual_seed(seed)
        drawn, labels = self.drawn(generator)
        order = torch.randperm(len(drawn), generator=generator, device=self.device)[: len(indices)]
        for number, batch in enumerate(batch_slices(len(indices), batch_size, join=train)):
            part = share.rows(number)
            if part is not None:
                chosen = order[batch][part]
                yield drawn[chosen], labels[chosen]

    def drawn(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """All rows of an epoch, (n x rows, d), distribution by distribution, and their classes (n x rows,)."""
        count, width = self.means.shape
        noise = torch.randn((count, self.rows, width), generator=generator, device=self.device)
        spread = noise @ self.roots.mT if self.roots.ndim == 3 else noise * self.roots.unsqueeze(1)
        return (self.means.unsqueeze(1) + spread).flatten(0, 1), self.labels.repeat_interleave(self.rows)
