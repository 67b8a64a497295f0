import torch

from pycil_wsc.registry import register_optimizer
from pycil_wsc.training.optimization import Group
from pycil_wsc.training.options import OptimizerOptions


@register_optimizer("sgd")
def sgd(groups: list[Group], config: OptimizerOptions) -> torch.optim.Optimizer:
    """SGD with the key ``momentum``, as in PyCIL."""
    return torch.optim.SGD(groups, momentum=config.momentum, fused=True)
