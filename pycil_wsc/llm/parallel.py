"""The processes that ``torchrun`` started, each with the same model and its share of every batch; or this one alone."""

import os
from datetime import timedelta

import torch
from torch import distributed

PATIENCE = timedelta(days=7)  # processes wait for the first one between runs
BUCKET = 2**25  # elements that are summed at a time


def launched():
    """Whether ``torchrun`` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Processes:
    """``rank`` of ``count``; the first writes all files."""

    def __init__(self):
        self.rank, self.count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if launched() else (0, 1)
        if self.count > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE
            )

    @property
    def first(self):
        return self.rank == 0

    def device(self, device):
        """This process's own of several GPUs."""
        own = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device.type == "cuda" and self.count > 1 else device
        )
        if own.type == "cuda":
            torch.cuda.set_device(own)
        return own

    def share(self, values):
        """This process's part of a list."""
        return values[self.rank :: self.count]

    def gather(self, share, total):
        """The whole list of ``total`` values from every process's :meth:`share`."""
        if self.count == 1:
            return share
        shares = [None] * self.count
        distributed.all_gather_object(shares, share)
        whole = [None] * total
        for rank, part in enumerate(shares):
            whole[rank :: self.count] = part
        return whole

    def tell(self, message):
        """The first process's ``message``, in every process."""
        box = [message]
        if self.count > 1:
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, value):
        """Whether all processes have the same ``value``; they wait for each other."""
        values = self.gather([value], self.count)
        return all(other == value for other in values)

    def sum(self, tensor):
        """The sum over all processes."""
        return self.sum_(tensor.clone())

    def before(self, count):
        """The sum of a whole number over the processes before this one."""
        return sum(self.gather([count], self.count)[: self.rank])

    def sum_(self, tensor):
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def sum_gradients_(self, parameters):
        """Add up the gradients of all processes, in place; one that is missing here counts as zero."""
        if self.count == 1:
            return
        bucket, size = [], 0
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            size += parameter.numel()
            if size >= BUCKET:
                self._sum_bucket(bucket)
                bucket, size = [], 0
        self._sum_bucket(bucket)

    def _sum_bucket(self, gradients):
        if gradients:
            flat = self.sum_(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
                gradient.copy_(part.view_as(gradient))
