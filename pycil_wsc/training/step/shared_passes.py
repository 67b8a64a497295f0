"""The forward and backward pass of a step in several processes: each computes its part of the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pycil_wsc.training.batch_norm.parted import OwnBatchNorm
from pycil_wsc.training.batch_norm.synced import SyncedBatchNorm
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.step.passes import Passes

# what a loss may read of a batch beside its tensors
OTHERS = ("whole", "replayed", "replay", "slots", "stored", "plain")
Loss = Callable[[Batch], tuple[Tensor, Tensor]]  # batch -> (mean loss, logits)


class SharedPasses(Passes):
    """:class:`Passes` on this process's images of a batch; the gradients are those of the whole batch's mean loss.

    DistributedDataParallel wraps the loss, not the network: losses call parts of networks, several networks, or a part
    twice. The gradients of the parameters of ``optimizer`` are summed over processes; a parameter that no process uses
    keeps a gradient of None.

    ``own_batch_norm``: each process's batch norm normalises its own part; otherwise the whole batch.

    Returns this process's part of the mean loss and its number of correct predictions; their sums over processes are
    those of the whole batch. A process weighs as much as its number of images, those that are replayed included; it may
    be 0 in a last batch.
    """

    def __init__(self, compute: Loss, optimizer: Optimizer, processes: Processes, own_batch_norm: bool) -> None:
        super().__init__(compute, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.processes, self.own_batch_norm = processes, own_batch_norm
        self.shared = DistributedDataParallel(_LossModule(compute, parameters), find_unused_parameters=True)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        whole = self.processes.sum(torch.full((), float(batch.weight), device=batch.targets.device))
        share = batch.weight / whole
        with OwnBatchNorm(share) if self.own_batch_norm else SyncedBatchNorm():
            others = {name: getattr(batch, name) for name in OTHERS}
            loss, logits = self.shared(*batch.tensors, **others)
            part = loss * share
            (part * self.processes.count).backward()  # DistributedDataParallel takes the mean over processes
        self.logits = logits if batch.entering else None
        right = (logits.argmax(1) == batch.targets).sum()
        return part.detach() if batch.weight else torch.zeros_like(whole), right


class _LossModule(nn.Module):
    """A loss as a module with the trained parameters; without buffers, which DistributedDataParallel broadcasts."""

    def __init__(self, compute: Loss, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.compute, self.trained = compute, nn.ParameterList(parameters)

    def forward(
        self,
        images: Tensor,
        targets: Tensor,
        indices: Tensor,
        from_memory: Tensor,
        views: tuple[Tensor, ...],
        drawn: tuple[Tensor, ...],
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        batch = Batch(images, targets, indices, from_memory, views, drawn=drawn, **others)
        loss, logits = self.compute(batch)
        return loss, logits.detach()
