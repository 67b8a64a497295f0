"""The keys ``wsc.*`` of a class-incremental run: those of any program that trains by epochs, those of the rival scores
and resets (:mod:`pycil_wsc.studies.rival_keys`), and the triggers that end the warm-up. Reading them needs no torch.
"""

from dataclasses import dataclass
from functools import partial

from pycil_wsc import keys
from pycil_wsc.consolidation.options import EpochOptions
from pycil_wsc.keys import again
from pycil_wsc.studies.rival_keys import RivalKeys

key = partial(keys.key, decides="later tasks")  # a consolidated first task (`first_task`) is not shared between runs


@dataclass(frozen=True)
class WSCKeys(RivalKeys, EpochOptions):
    """Options of Weight Space Consolidation on a learner, with the scores and resets that need data or the network."""

    importance: str = again(
        EpochOptions,
        "importance",
        doc="score that ranks the parameters: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
        choices=(),  # those that are registered
        decides="later tasks",
    )
    reset: str = again(
        EpochOptions,
        "reset",
        doc="`blend` with the weights before the task, `revert` to them, `random` initial values, `shrink_perturb` (all"
        " parameters), `continual_backprop` (units, throughout the task), or `none`",
        choices=(),
        decides="later tasks",
    )
    trigger: str = key(
        "warmup",
        "what ends the warm-up: a fraction of the epochs (`warmup`), or a plateau of the `training_loss` or of the loss"
        " on `held_out` exemplars; without a plateau the task is trained as by Replay",
        choices=("warmup", "training_loss", "held_out"),
    )
    patience: int = key(3, "a plateau is this many epochs without a new lowest loss", low=1)
    min_delta: float = key(0.0, "a loss is a new lowest one if it is lower by more than this", low=0)
    held_out: float = key(
        0.1,
        "`held_out`: fraction of each class's exemplars excluded from training, at least one",
        low=0,
        high=0.5,
    )

    def _check_each(self) -> None:
        """They were checked as keys."""
