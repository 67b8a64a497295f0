from pycil_wsc.methods.consolidation.consolidated import consolidated
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner


@register_learner("wsc", epochs=70, milestones=[30, 50])
class WSC(consolidated(Replay)):
    """Replay with Weight Space Consolidation: "Ours" in Forget Forgetting."""
