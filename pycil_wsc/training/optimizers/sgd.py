import torch

from pycil_wsc.registry import register_optimizer
from pycil_wsc.training.learner_config import OptimizerOptions
from pycil_wsc.training.optimizers.parameter_groups import Group


@register_optimizer("sgd")
def sgd(groups: list[Group], config: OptimizerOptions) -> torch.optim.Optimizer:
    """SGD with the key ``momentum``, as in PyCIL."""
    return torch.optim.SGD(groups, momentum=config.momentum, fused=True)
