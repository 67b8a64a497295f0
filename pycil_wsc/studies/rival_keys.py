"""The keys of the rival importances and resets."""

from dataclasses import dataclass
from functools import partial

from pycil_wsc import keys

key = partial(keys.key, decides="later tasks")


@dataclass(frozen=True)
class RivalKeys:
    """Options of the baseline importance scores and resets. The text of each names the one that reads it."""

    importance_samples: int | None = key(
        None, "`fisher` and `hessian`: training samples used, drawn by `seed`; null: all", low=1
    )
    probes: int = key(1, "`hessian`: random vectors of Hutchinson's estimator", low=1)
    shrink: float = key(0.6, "`shrink_perturb`: factor of the current weights", low=0, high=1)
    perturb: float = key(0.01, "`shrink_perturb`: factor of the added random initial values", low=0)
    replacement_rate: float = key(
        1e-5, "`continual_backprop`: fraction of the mature units replaced per step", low=0, high=1
    )
    maturity: int = key(1000, "`continual_backprop`: steps during which a new unit is not replaced", low=0)
    utility_decay: float = key(0.99, "`continual_backprop`: decay of the running mean of the utility", low=0, below=1)
