"""The keys ``wsc.*`` of a class-incremental run, composed of the options that the rooms declare."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pycil_wsc import keys
from pycil_wsc.consolidation.options import EpochOptions
from pycil_wsc.engine.options import TriggerOptions
from pycil_wsc.errors import UserError
from pycil_wsc.studies.options import RivalOptions

key = partial(keys.key, decides="later tasks")  # a consolidated first task (`first_task`) is not shared between runs


@dataclass(frozen=True)
class WSCKeys(TriggerOptions, RivalOptions, EpochOptions):
    """Options of Weight Space Consolidation on a learner, which has its data: more scores and resets are possible."""

    importance: str = key(
        "moment",
        "score that ranks the parameters: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
    )
    reset: str = key(
        "blend",
        "`blend` with the weights before the task, `revert` to them, `random` initial values, `shrink_perturb` (all"
        " parameters), `continual_backprop` (units, throughout the task), or `none`",
    )


REMOVED = {  # key: the value that applies now, and what to use instead of another one
    "wsc.score_abs": (False, "moment_score(absolute=True) in a loop of your own"),
    "wsc.reset_head": (True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_norm": (True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_new_rows": (True, "eligible= of WeightSpaceConsolidation in a loop of your own"),
    "wsc.reset_momentum": (False, "Blend(momentum=True) in a loop of your own"),
    "wsc.reset_buffers": (False, "Blend(buffers=True) in a loop of your own"),
    "wsc.average_unit": ("epoch", "wsc.average_every below 1, a share of the warm-up's steps"),
    "wsc.average_start": ("reset", "Average(start='first') in a loop of your own"),
    "wsc.bn_update": ("recompute", "recompute_batch_norm, or leave it out, in a loop of your own"),
}


def outlived(name: str, value: Any) -> bool:
    """Whether a key of earlier versions has the value that applies now, so that it says nothing."""
    return name in REMOVED and value == REMOVED[name][0]


def without_removed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``flat`` without keys of earlier versions that have the value that applies now.

    Raises a :class:`UserError` for one with another value.
    """
    kept = {name: value for name, value in flat.items() if not outlived(name, value)}
    for name in kept:
        if name in REMOVED:
            raise UserError(f"{name}: is no longer a key; use {REMOVED[name][1]}")
    return kept
