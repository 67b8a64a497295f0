"""Weight Space Consolidation: an object over pure functions, like ``torch.optim.swa_utils``. Imports torch alone."""

from pycil_wsc.consolidation.averaging import Average
from pycil_wsc.consolidation.batch_norm import recompute_batch_norm
from pycil_wsc.consolidation.checks import NonFiniteGradients
from pycil_wsc.consolidation.continual_backprop import ContinualBackprop
from pycil_wsc.consolidation.diagonals import fisher_diagonal, hessian_diagonal
from pycil_wsc.consolidation.functional import (
    average_,
    blend_,
    drift,
    first_moment,
    moment_product,
    rank_reset_,
    replace_,
    reset_,
    revert_,
    second_moment,
    shrink_perturb_,
    update_moments_,
)
from pycil_wsc.consolidation.importance import (
    Importance,
    drift_score,
    first_moment_score,
    moment_score,
    second_moment_score,
)
from pycil_wsc.consolidation.ranking import top_mask
from pycil_wsc.consolidation.resets import Blend, Random, Reset, Revert, ShrinkPerturb
from pycil_wsc.consolidation.wsc import WeightSpaceConsolidation

__all__ = [
    "Average",
    "Blend",
    "ContinualBackprop",
    "Importance",
    "NonFiniteGradients",
    "Random",
    "Reset",
    "Revert",
    "ShrinkPerturb",
    "WeightSpaceConsolidation",
    "average_",
    "blend_",
    "drift",
    "drift_score",
    "first_moment",
    "first_moment_score",
    "fisher_diagonal",
    "hessian_diagonal",
    "moment_product",
    "moment_score",
    "rank_reset_",
    "recompute_batch_norm",
    "replace_",
    "reset_",
    "revert_",
    "second_moment",
    "second_moment_score",
    "shrink_perturb_",
    "top_mask",
    "update_moments_",
]
