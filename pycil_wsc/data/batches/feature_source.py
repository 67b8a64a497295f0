"""Stored features as a source of batches, for methods that train a classifier on them."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.batches.epoch_order import WHOLE, Share, batch_slices, epoch_order


class FeatureSource:
    """Rows of features in place of images: the same batches as :class:`~.loader.Source`, not normalised or augmented.

    Args:
        features: (n, d), on any device; the batches have its dtype.
        device: the device of the batches, to which the features are copied.
    """

    def __init__(self, features: Tensor, device: torch.device) -> None:
        self.features, self.device = features.to(device), device

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
        """Yield batches of one epoch: rows (B, d) and targets int64 (B,), on the device.

        Args:
            indices: int64 array, the rows of the epoch.
            targets: int64 (n,), the targets of all rows.
            batch_size: rows per batch.
            train: shuffle the rows by ``seed``, and merge a last batch of one row into the previous one.
            seed: seed of the epoch.
            shuffle: False: do not shuffle, even with ``train``.
            share: the part of each batch to yield.
        """
        order = epoch_order(indices, train and shuffle, seed)
        rows, labels = torch.from_numpy(order).to(self.device), torch.from_numpy(targets[order]).to(self.device)
        for number, batch in enumerate(batch_slices(len(order), batch_size, join=train)):
            here = share.rows(number)
            if here is not None:
                yield self.features[rows[batch][here]], labels[batch][here]
