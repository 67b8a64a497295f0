from dataclasses import dataclass

from pycil_wsc.keys import key
from pycil_wsc.methods.pretrained.aper_adapter import AS_PILOT, TunedOnce
from pycil_wsc.networks.tuning.modules import Prompts
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner


@register_learner("aper_vpt", **AS_PILOT)
class APERVPT(TunedOnce):
    """APER with prompts (Zhou et al., IJCV 2024): learned tokens beside those of the image (VPT, Jia et al., 2022)."""

    @dataclass(frozen=True)
    class Options:
        vpt_type: str = key(
            "deep",
            "each block has prompts of its own (`deep`), or they enter the first block and go through all (`shallow`)",
            choices=("deep", "shallow"),
        )
        prompt_token_num: int = key(5, "prompts of a block", low=1)

    def tune(self, backbone: TunedTransformer) -> None:
        options = self.config.options
        depth = backbone.depth if options.vpt_type == "deep" else 1
        backbone.sets.append(Prompts(backbone.dim, options.prompt_token_num, depth))
