"""The keys ``wsc.*`` of a class-incremental run, composed of the options that subpackages declare."""

from dataclasses import dataclass
from functools import partial

from pycil_wsc import keys
from pycil_wsc.consolidation.options import EpochOptions
from pycil_wsc.keys import again
from pycil_wsc.studies.options import RivalOptions
from pycil_wsc.training.options import TriggerOptions

key = partial(keys.key, decides="later tasks")  # a consolidated first task (`first_task`) is not shared between runs


@dataclass(frozen=True)
class WSCKeys(TriggerOptions, RivalOptions, EpochOptions):
    """Options of Weight Space Consolidation on a learner, with the scores and resets that need data or the network."""

    importance: str = key(
        "moment",
        "score that ranks the parameters: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
        studied=1,
    )
    reset: str = key(
        "blend",
        "`blend` with the weights before the task, `revert` to them, `random` initial values, `shrink_perturb` (all"
        " parameters), `continual_backprop` (units, throughout the task), or `none`",
        studied=2,
    )
    reset_every: str | int = again(EpochOptions, "reset_every", studied=3)
    average: bool = again(EpochOptions, "average", studied=4)
    retain: float = again(EpochOptions, "retain", studied=5)
