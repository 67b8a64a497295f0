"""Weight Space Consolidation: an object over pure functions, like ``torch.optim.swa_utils``. Imports torch and nothing of ours."""

from pycil_wsc.consolidation.batch_norm import recompute_batch_norm
from pycil_wsc.consolidation.continual_backprop import ContinualBackprop
from pycil_wsc.consolidation.functional import (
    average_,
    blend_,
    rank_reset_,
    replace_,
    reset_,
    revert_,
    shrink_perturb_,
    update_moments_,
)
from pycil_wsc.consolidation.importance import (
    drift_score,
    first_moment_score,
    fisher_diagonal,
    hessian_diagonal,
    moment_score,
    second_moment_score,
)
from pycil_wsc.consolidation.options import Options
from pycil_wsc.consolidation.ranking import top_mask
from pycil_wsc.consolidation.wsc import WeightSpaceConsolidation

__all__ = [
    "ContinualBackprop",
    "Options",
    "WeightSpaceConsolidation",
    "average_",
    "blend_",
    "drift_score",
    "first_moment_score",
    "fisher_diagonal",
    "hessian_diagonal",
    "moment_score",
    "rank_reset_",
    "recompute_batch_norm",
    "replace_",
    "reset_",
    "revert_",
    "second_moment_score",
    "shrink_perturb_",
    "top_mask",
    "update_moments_",
]
