"""Batch norm that normalises parts of a batch separately, as on several GPUs without synchronisation.

Smaller parts regularise more: "ghost batch norm" of Hoffer et al. (2017), "Train longer, generalize better".
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode


class Call(NamedTuple):
    """The arguments of ``torch.nn.functional.batch_norm``; ``input``: (B, C, ...)."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class BatchNormMode(TorchFunctionMode):
    """A context in which its method ``normalised`` replaces ``torch.nn.functional.batch_norm``."""

    def normalised(self, call: Call) -> Tensor:
        """What the call returns."""
        raise NotImplementedError

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        return self.normalised(Call(*args, **kwargs)) if function is batch_norm else function(*args, **kwargs)


class PartedBatchNorm(BatchNormMode):
    """A context in which ``torch.nn.functional.batch_norm`` in training mode normalises each of ``parts`` separately.

    The images of a batch are divided in their order, as by ``torch.chunk``. The running statistics after a step are the
    mean of those of the parts, weighted by their images. One value of a channel has no variance: a part of a single
    image is normalised with the running statistics where maps are 1x1.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def normalised(self, call: Call) -> Tensor:
        images, running_mean, running_var, weight, bias, training, momentum, eps = call
        # layers without running statistics set `training` in tests, too
        if not training or running_mean is None or running_var is None:
            return batch_norm(*call)
        outputs, means, variances = [], torch.zeros_like(running_mean), torch.zeros_like(running_var)
        for part in images.chunk(self.parts):
            mean, var = running_mean.clone(), running_var.clone()
            training, fused = not _single_values(part), torch.backends.cudnn.enabled
            # not `batch_norm`, which would be divided once more where torch.compile leaves this context on its stack
            outputs.append(torch.batch_norm(part, weight, bias, mean, var, training, momentum, eps, fused))
            torch._foreach_add_([means, variances], [mean, var], alpha=len(part) / len(images))
        torch._foreach_copy_([running_mean, running_var], [means, variances])
        return torch.cat(outputs)


class UntrackedBatchNorm(BatchNormMode):
    """A context in which batch norm in training mode normalises a batch, but leaves its running statistics alone."""

    def normalised(self, call: Call) -> Tensor:
        if call.training and call.running_mean is not None and call.running_var is not None:
            call = call._replace(running_mean=call.running_mean.clone(), running_var=call.running_var.clone())
        return batch_norm(*call)


class OwnBatchNorm(BatchNormMode):
    """A context in which each process normalises its own part of a batch, with ``share`` (0 to 1) of its images.

    On exit, after the backward pass, the running statistics are replaced by their mean over the processes, weighted by
    ``share``, so that they are the same in all processes. A loss that tests the network sees those of its own process.
    All processes must compute the same layers. One value of a channel has no variance: a process's single image is
    normalised with the running statistics where maps are 1x1.
    """

    def __init__(self, share: Tensor) -> None:
        super().__init__()
        self.share, self.running = share, {}

    def normalised(self, call: Call) -> Tensor:
        if call.training and call.running_mean is not None:
            self.running |= {id(statistic): statistic for statistic in (call.running_mean, call.running_var)}
            call = call._replace(training=not _single_values(call.input))
        return batch_norm(*call)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.running and error[0] is None:
            statistics = list(self.running.values())
            mean = self.share * torch.cat(statistics)
            distributed.all_reduce(mean)
            torch._foreach_copy_(statistics, list(mean.split([len(tensor) for tensor in statistics])))


def _single_values(images: Tensor) -> bool:
    """Whether each channel has one value, and so no variance."""
    return images.numel() == images.shape[1]
