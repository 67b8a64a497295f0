"""Means, sums and norms over a whole batch, of which several processes have a part each."""

import torch
from torch import Tensor

from pycil_wsc.training.batches import Batch
from pycil_wsc.training.processes import Processes


class Over:
    """Reductions of values per image for a method's loss: ``self.over`` of a learner.

    A loss is weighed by the process's share of the batch. With one process, these are torch's own reductions.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

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
            own = len(values) if batch is None else batch.weight
            count, whole = self.processes.sum(torch.stack([count, torch.full_like(count, own)]))
            total = total * whole / max(own, 1)
        return total / count.clamp(min=1)

    def sum(self, values: Tensor, batch: Batch) -> Tensor:
        """The sum of ``values`` (any shape) over the whole ``batch``: a scalar."""
        total = values.sum()
        if batch.whole is not None:
            whole = batch.whole + sum(each.whole or 0 for each in batch.replay)
            total = total * (whole / max(batch.weight, 1))
        return total

    def norm(self, values: Tensor, batch: Batch) -> Tensor:
        """The Euclidean norm of ``values`` (any shape) over the whole ``batch``: a scalar."""
        if self.processes.count == 1:
            return values.norm()
        own = values.square().sum()
        half = own / (2 * self.processes.sum(own.detach()).sqrt().clamp(min=1e-12))
        return self.sum(half + half.detach(), batch)  # the halves add up to the norm; its gradient is that of one

    def losses(self, losses: Tensor, own: int) -> Tensor:
        """The values of mean losses over the whole batch, from those of this process's ``own`` images: (n,) -> (n,)."""
        losses = losses.detach()
        if self.processes.count == 1:
            return losses
        count = torch.full((1,), float(own), device=losses.device)
        sums = self.processes.sum(torch.cat([losses.nan_to_num() * count, count]))  # nan: the mean of no image
        return sums[:-1] / sums[-1]
