"""Weight Space Consolidation: an object over pure functions, like ``torch.optim.swa_utils``. Imports torch and nothing of ours."""

from pycil_wsc.consolidation.batch_norm import recompute_batch_norm
from pycil_wsc.consolidation.functional import average_, blend_, moment_score, rank_reset_, revert_, update_moments_
from pycil_wsc.consolidation.options import Options
from pycil_wsc.consolidation.ranking import top_mask
from pycil_wsc.consolidation.wsc import WeightSpaceConsolidation

__all__ = [
    "Options",
    "WeightSpaceConsolidation",
    "average_",
    "blend_",
    "moment_score",
    "rank_reset_",
    "recompute_batch_norm",
    "revert_",
    "top_mask",
    "update_moments_",
]
