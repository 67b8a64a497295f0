from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.step.backward import Backward


@register_learner("sam", epochs=70, milestones=[30, 50])
class SAM(Replay):
    """Sharpness-aware minimisation (Foret et al., ICLR 2021, https://arxiv.org/abs/2010.01412), with Replay.

    Each step takes the gradient at the point where the loss is largest within ``rho``, found by one gradient more. The
    second pass leaves the statistics of batch norm alone. The first task is trained in the same way.
    Unlike the authors' code, weight decay is in the optimiser's step only, and there is no clipping and no Nesterov
    momentum.
    """

    @dataclass(frozen=True)
    class Options:
        rho: float = key(
            0.05, "radius of the perturbation of the weights (0.05 in the authors' example for CIFAR-10)", above=0
        )

    class Plan(Replay.Plan):
        plain_first_task = False

    @torch.no_grad()
    def after_backward(self, batch: Batch, backward: Backward) -> None:
        moved: list[Tensor] = [p for p in self.network.parameters() if p.grad is not None]
        gradients: list[Tensor] = [p.grad for p in moved if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        weights = [p.clone() for p in moved]
        steps = torch._foreach_mul(gradients, self.config.options.rho / (norm + 1e-12))
        torch._foreach_add_(moved, steps)
        norms = [module for module in self.network.modules() if isinstance(module, _BatchNorm) and module.training]
        statistics = [[buffer.clone() for buffer in module.buffers()] for module in norms]
        with torch.enable_grad():
            backward(batch)
        for module, kept in zip(norms, statistics):
            for buffer, value in zip(module.buffers(), kept):
                buffer.copy_(value)
        torch._foreach_copy_(moved, weights)
