import torch

from pycil_wsc.engine.optimization import Group
from pycil_wsc.engine.options import OptimizerOptions
from pycil_wsc.registry import register_optimizer


@register_optimizer("sgd")
def sgd(groups: list[Group], config: OptimizerOptions) -> torch.optim.Optimizer:
    """SGD with the key ``momentum``, as in PyCIL."""
    return torch.optim.SGD(groups, momentum=config.momentum, fused=True)
