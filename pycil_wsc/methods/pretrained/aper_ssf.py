from pycil_wsc.methods.pretrained.aper_adapter import AS_PILOT, TunedOnce
from pycil_wsc.networks.tuning.modules import Scales
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner


@register_learner("aper_ssf", **AS_PILOT)
class APERSSF(TunedOnce):
    """APER with a scale and a shift after each layer (Zhou et al., IJCV 2024; SSF, Lian et al., NeurIPS 2022)."""

    def tune(self, backbone: TunedTransformer) -> None:
        backbone.sets.append(Scales(backbone.vit))
