import torch

from pycil_wsc.registry import register_optimizer
from pycil_wsc.training.learner_config import OptimizerOptions
from pycil_wsc.training.optimizers.parameter_groups import Group


# torch's defaults; PyCIL's learning rate of 0.1, which is also the default of `wsc.average_lr`, is for SGD
@register_optimizer(
    "adam",
    **dict.fromkeys(("init_lr", "lrate"), 1e-3),
    **dict.fromkeys(("init_weight_decay", "weight_decay"), 0.0),
    **{"wsc.average_lr": None},
)
def adam(groups: list[Group], config: OptimizerOptions) -> torch.optim.Optimizer:
    """Adam (Kingma and Ba, 2015) with the key ``betas``; the weight decay is added to the gradient."""
    first, second = config.betas
    return torch.optim.Adam(groups, betas=(first, second), fused=True)
