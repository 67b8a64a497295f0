"""Batch norm over the images of all processes, as if one process had the whole batch.

``torch.nn.SyncBatchNorm`` works on GPUs only and replaces modules of torch's own classes. Here the function that all
batch norms call is intercepted in the forward pass. This works with gloo on the CPU too, covers a backbone's own
subclass of batch norm, and does not change how weights are saved and loaded.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from pycil_wsc.devices import widest_float
from pycil_wsc.training.batch_norm.parted import BatchNormMode, Call
from pycil_wsc.training.processes import Processes


def synced_batch_norm(processes: Processes) -> AbstractContextManager[object]:
    """:class:`SyncedBatchNorm` if there are several ``processes``, else an empty context."""
    return SyncedBatchNorm() if processes.count > 1 else nullcontext()


class SyncedBatchNorm(BatchNormMode):
    """A context in which ``torch.nn.functional.batch_norm`` in training mode uses the statistics of all processes.

    All processes must compute the same layers; a process without images takes part with an empty batch.
    """

    def normalised(self, call: Call) -> Tensor:
        if not call.training:
            return batch_norm(*call)
        images, running_mean, running_var, weight, bias, _, momentum, eps = call
        with torch.no_grad():
            mean, var, count = _statistics(images)
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1).clamp(min=1))).to(running_var.dtype), momentum)
        ones = torch.ones_like(mean, dtype=torch.float32)
        weight, bias = ones if weight is None else weight, torch.zeros_like(ones) if bias is None else bias
        return _Normalise.apply(images, weight, bias, mean.float(), var.float(), count.float(), eps)


def _statistics(images):
    """Mean and biased variance of each channel over all processes, and the number of values: (C,), (C,), ()."""
    values = images.numel() // images.shape[1]
    wide = widest_float(images.device)
    sums = torch.zeros(2 * images.shape[1] + 1, dtype=wide, device=images.device)
    if values:
        var, mean = torch.var_mean(images.float(), dim=[0, *range(2, images.dim())], correction=0)
        mean = mean.to(wide)
        sums[:-1] = values * torch.cat([mean, var.to(wide) + mean.square()])
        sums[-1] = values
    distributed.all_reduce(sums)
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    return mean, (square - mean.square()).clamp(min=0), sums[-1]


class _Normalise(torch.autograd.Function):
    """(images - mean) / sqrt(var + eps) * weight + bias, with the gradient that flows through mean and variance."""

    @staticmethod
    def forward(ctx, images, weight, bias, mean, var, count, eps):
        ctx.save_for_backward(images, weight, mean, var, count)
        ctx.eps = eps
        if not images.numel():  # torch's CPU kernels do not support empty batches
            return torch.empty_like(images)
        return batch_norm(images, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        images, weight, mean, var, count = ctx.saved_tensors
        direct, by_weight, by_bias = torch.empty_like(images), torch.zeros_like(weight), torch.zeros_like(weight)
        if images.numel():
            # unused here, but CUDA's kernel for channels-last images insists on tensors
            saved = [mean.new_empty(0)] * 2
            direct, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, images, weight, mean, var, *saved, False, ctx.eps, [True, True, True]
            )
        sums = torch.cat([by_weight, by_bias]).float()  # sums of gradient * normalised image, and of the gradient
        distributed.all_reduce(sums)
        scale = weight * (var + ctx.eps).rsqrt() / count
        slope = -scale * (var + ctx.eps).rsqrt() * sums[: len(mean)]
        shift = -scale * sums[len(mean) :] - slope * mean
        shape = [1, -1, *[1] * (images.dim() - 2)]
        through = torch.addcmul(shift.view(shape), images, slope.view(shape))
        return direct + through.to(direct.dtype), by_weight, by_bias, None, None, None, None
