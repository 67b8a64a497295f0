from typing import Any

import torch

from pycil_wsc.registry import register_optimizer


# torch's defaults; PyCIL's learning rate of 0.1, which is also the default of `wsc.average_lr`, is for SGD
@register_optimizer(
    "adamw",
    **dict.fromkeys(("init_lr", "lrate"), 1e-3),
    **dict.fromkeys(("init_weight_decay", "weight_decay"), 0.01),
    **{"wsc.average_lr": None},
)
def adamw(groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with the key ``betas``."""
    return torch.optim.AdamW(groups, betas=tuple(config.betas), fused=True)
