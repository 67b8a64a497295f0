"""Classes of unequal size: the weight of each image in a loss, ``"class_balance": "weights"``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from pycil_wsc.training.batches import Batch


class ClassWeights:
    """Weights of the images of the batch whose loss is being computed: ``self.balance`` of a learner.

    An image of class c weighs N / (C n_c), where a phase has N images, of C classes, n_c of them of class c: their mean
    over an epoch is 1. A loss is then a plain mean over the batch, so that processes can share it.

    ``table``: the weight of each class in the present phase, float32 (classes,), or None without weights. ``used``:
    whether a loss has asked for the weights since they were set.
    """

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.rows: Tensor | None = None
        self.used = False

    def begin(self, table: Tensor | None) -> None:
        """Set the weights of a phase."""
        self.table, self.rows, self.used = table, None, False

    @contextlib.contextmanager
    def within(self, batch: Batch) -> Iterator[None]:
        """A context in which the loss of ``batch`` is computed."""
        self.rows = None if self.table is None else self.table[batch.targets]
        try:
            yield
        finally:
            self.rows = None

    def weighted(self, errors: Tensor, classes: Tensor | None = None) -> Tensor:
        """``errors`` (n,), each times the weight of its image; outside of a step, and without weights, as they are.

        ``classes``: int64 (n,), of which class each is; None: they are those of the batch's images, in their order.
        """
        if self.rows is None:
            return errors
        self.used = True
        assert self.table is not None
        return errors * (self.rows if classes is None else self.table[classes])
