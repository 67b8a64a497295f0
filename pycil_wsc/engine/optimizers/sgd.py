from typing import Any

import torch

from pycil_wsc.registry import register_optimizer


@register_optimizer("sgd")
def sgd(groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer:
    """SGD with the key ``momentum``, as in PyCIL."""
    return torch.optim.SGD(groups, momentum=config.momentum, fused=True)
