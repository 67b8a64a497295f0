"""Features of some images of each class, which a learner keeps to tell how familiar another image is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGEST = 65504.0  # of float16


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """Features of images, in the network that a learner predicts with.

    Args:
        values: float16 (n, d).
        labels: the images' classes, by number: int64 (n,).
        digests: of the images (:func:`~pycil_wsc.classifier.store.hashes.digests_of`): int64 (n,).
        held_out: whether each is held out from training, and does not stand for a learned one: bool (n,).
    """

    values: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float16))
    labels: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    digests: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    held_out: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, bool))

    @classmethod
    def of(cls, values: np.ndarray, labels: np.ndarray, digests: np.ndarray, held_out: bool) -> Features:
        """Those of images that are all held out, or all learned; ``values``: float32 (n, d)."""
        rounded = torch.from_numpy(values).clamp(-LARGEST, LARGEST).half()
        return cls(rounded, labels, digests, np.full(len(labels), held_out))

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: np.ndarray) -> Features:
        """Some of the images: bool (n,), or their places."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        values = self.values[torch.from_numpy(places)]
        return Features(values, self.labels[places], self.digests[places], self.held_out[places])

    def regrouped(self, numbers: np.ndarray) -> Features:
        """These with other classes: ``numbers`` has what each class becomes, -1 if it is left out: (classes,)."""
        labels = numbers[self.labels]
        return dataclasses.replace(self, labels=labels).rows(labels >= 0)

    def relabelled(self, digests: np.ndarray, label: int) -> Features:
        """These, with the images of some ``digests`` in the class ``label``."""
        labels = np.where(np.isin(self.digests, digests), label, self.labels)
        return dataclasses.replace(self, labels=labels)

    def problem(self, classes: int) -> str:
        """What of features read from a file does not fit a learner of so many ``classes``; "" if all does."""
        number = len(self.labels)
        shapes = {self.labels.shape, self.digests.shape, self.held_out.shape}
        is_typed = self.values.dtype == torch.float16 and self.held_out.dtype == bool
        is_typed &= self.labels.dtype == np.int64 and self.digests.dtype == np.int64
        if shapes != {(number,)} or self.values.ndim != 2 or len(self.values) != number or not is_typed:
            return "features"
        return "" if not number or 0 <= self.labels.min() <= self.labels.max() < classes else "features"


def joined(parts: Sequence[Features]) -> Features:
    """The images of all ``parts``, of one width; without the empty ones."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return Features()
    values = torch.cat([part.values for part in filled])
    labels, digests, held_out = (
        np.concatenate([getattr(part, name) for part in filled]) for name in ("labels", "digests", "held_out")
    )
    return Features(values, labels, digests, held_out)
