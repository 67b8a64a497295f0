"""Over a batch: means, sums and norms of what several processes have a part of each, and the weights of its images."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc.training.batches import Batch
from pycil_wsc.training.processes import Processes


class Over:
    """Reductions of values per image for a method's loss: ``self.over`` of a learner.

    A loss is weighed by the process's share of the batch. With one process, these are torch's own reductions.
    """

    def __init__(self, processes: Processes, label_smoothing: float) -> None:
        self.processes = processes
        self.label_smoothing = label_smoothing
        self.weights = ClassWeights()

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        classes: Tensor | None = None,
        weighted: bool = True,
        reduction: str = "mean",
    ) -> Tensor:
        """The mean cross-entropy with ``label_smoothing``: (n, classes) float32, (n,) -> scalar.

        With ``"class_balance": "weights"``, each image has the weight of its class (:meth:`weighted`).

        Args:
            logits: of n rows, by default of the batch's images.
            targets: the columns that are right.
            classes: the class of each row, if they are not the batch's images in their order.
            weighted: False: rows are not images, such as prototypes.
            reduction: "none" for that of each row, (n,), without weights, to be averaged by :meth:`mean`.
        """
        smoothing = self.label_smoothing
        if reduction == "none":
            return cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        if not weighted or self.weights.rows is None:
            return cross_entropy(logits, targets, label_smoothing=smoothing)
        errors = cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return self.weighted(errors, classes).mean()

    def weighted(self, errors: Tensor, classes: Tensor | None = None) -> Tensor:
        """``errors`` (n,), each times the weight of its image, with ``"class_balance": "weights"``: (n,).

        Outside of a step, and without weights, as they are. :meth:`cross_entropy` does it itself.

        ``classes``: int64 (n,), of which class each is; None: they are those of the batch's images, in their order.
        """
        weights = self.weights
        if weights.rows is None:
            return errors
        weights.used = True
        assert weights.table is not None
        return errors * (weights.rows if classes is None else weights.table[classes])

    def mean(self, values: Tensor, chosen: Tensor | None = None, batch: Batch | None = None) -> Tensor:
        """The mean of ``values`` (n,) where ``chosen``, bool (n,), is set, by default of all; 0 if it is nowhere.

        ``batch``: if n is not its number of images, as of those that are replayed. Does not synchronise with the
        device, as an index by ``chosen`` would.
        """
        if chosen is None and self.processes.count == 1:
            return values.mean()
        if chosen is None:
            chosen = torch.ones_like(values, dtype=torch.bool)
        total = torch.where(chosen, values, 0).sum()
        count = chosen.sum()
        if self.processes.count > 1:
            weight = len(values) if batch is None else batch.weight
            count, whole = self.processes.sum(torch.stack([count, torch.full_like(count, weight)]))
            total = total * whole / max(weight, 1)
        return total / count.clamp(min=1)

    def sum(self, values: Tensor, batch: Batch) -> Tensor:
        """The sum of ``values`` (any shape) over the whole ``batch``: a scalar."""
        total = values.sum()
        if batch.whole is not None:
            whole = batch.whole + sum(replayed.whole or 0 for replayed in batch.replay)
            total = total * (whole / max(batch.weight, 1))
        return total

    def norm(self, values: Tensor, batch: Batch) -> Tensor:
        """The Euclidean norm of ``values`` (any shape) over the whole ``batch``: a scalar."""
        if self.processes.count == 1:
            return values.norm()
        square = values.square().sum()
        half = square / (2 * self.processes.sum(square.detach()).sqrt().clamp(min=1e-12))
        return self.sum(half + half.detach(), batch)  # the halves add up to the norm; its gradient is that of one

    def rows(self, tensor: Tensor, whole: int | None) -> tuple[Tensor, Tensor]:
        """The rows of all processes, to whose own the gradients return. Does not synchronise with the device.

        Args:
            tensor: (n, d), those of this process's part of the batch (:attr:`Processes.share_of_each_batch`).
            whole: the rows of all; None: as many as these (:attr:`.Batch.whole`).

        Returns:
            (``whole``, d) rows in the order of the batch, and int64 (n,), where this process's own stand.
        """
        processes = self.processes
        places = processes.rank + processes.count * torch.arange(len(tensor), device=tensor.device)
        if processes.count == 1:
            return tensor, places
        placed = tensor.new_zeros(whole or len(tensor), tensor.shape[1]).index_copy(0, places, tensor)
        return _Sum.apply(placed, processes), places  # pyright: ignore[reportReturnType]

    def losses(self, losses: Tensor, images: int) -> Tensor:
        """The values of mean losses over the whole batch, from those of this process's ``images``: (n,) -> (n,)."""
        losses = losses.detach()
        if self.processes.count == 1:
            return losses
        count = torch.full((1,), float(images), device=losses.device)
        sums = self.processes.sum(torch.cat([losses.nan_to_num() * count, count]))  # nan: the mean of no image
        return sums[:-1] / sums[-1]


class ClassWeights:
    """Weights of the images of the batch whose loss is being computed: ``self.over.weights`` of a learner.

    They are for classes of unequal size, ``"class_balance": "weights"``.

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


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.sum(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.processes.sum(gradient), None
