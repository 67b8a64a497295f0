"""Weight Space Consolidation: an object over pure functions, like ``torch.optim.swa_utils``. Imports torch alone.

Names are imported when they are first used, so that the options can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycil_wsc.consolidation.averaging import Average
    from pycil_wsc.consolidation.batch_norm import recompute_batch_norm
    from pycil_wsc.consolidation.functional import (
        average_,
        blend_,
        drift,
        first_moment,
        moment_product,
        rank_reset_,
        reset_,
        revert_,
        second_moment,
        update_moments_,
    )
    from pycil_wsc.consolidation.importance import (
        Importance,
        drift_score,
        first_moment_score,
        moment_score,
        second_moment_score,
    )
    from pycil_wsc.consolidation.options import EpochOptions, WSCOptions
    from pycil_wsc.consolidation.ranking import top_mask
    from pycil_wsc.consolidation.resets import Blend, Reset, Revert
    from pycil_wsc.consolidation.tensor_checks import NonFiniteGradients
    from pycil_wsc.consolidation.weight_space_consolidation import WeightSpaceConsolidation

__all__ = [
    "Average",
    "Blend",
    "EpochOptions",
    "Importance",
    "NonFiniteGradients",
    "Reset",
    "Revert",
    "WSCOptions",
    "WeightSpaceConsolidation",
    "average_",
    "blend_",
    "drift",
    "drift_score",
    "first_moment",
    "first_moment_score",
    "moment_product",
    "moment_score",
    "rank_reset_",
    "recompute_batch_norm",
    "reset_",
    "revert_",
    "second_moment",
    "second_moment_score",
    "top_mask",
    "update_moments_",
]
_MODULES = (
    "options",
    "averaging",
    "batch_norm",
    "tensor_checks",
    "functional",
    "importance",
    "ranking",
    "resets",
    "weight_space_consolidation",
)


def __getattr__(name: str) -> object:
    for module in _MODULES if name in __all__ else ():
        loaded = importlib.import_module(f"{__name__}.{module}")
        if hasattr(loaded, name):
            return getattr(loaded, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
