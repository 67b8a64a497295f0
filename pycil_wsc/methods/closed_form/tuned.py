"""The base of the closed-form methods whose first task may tune a vision transformer from outside, as in PILOT."""

from dataclasses import dataclass

from torch import nn

from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.layers import mark_frozen
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.networks.tuning.modules import Adapter, Prompts, Scales
from pycil_wsc.networks.tuning.transformer import TunedTransformer, check_transformer


class TunedClosedForm(ClosedForm):
    """With ``tuning`` the first task trains small modules in a frozen transformer, with a cosine classifier."""

    @dataclass(frozen=True)
    class Options(ClosedForm.Options):
        tuning: str | None = key(
            None,
            "what the first task trains in a frozen vision transformer of timm: adapters, scales (`ssf`) or prompts "
            "(`vpt`); null: the backbone itself, if `adapt` says so",
            choices=(None, "adapter", "ssf", "vpt"),
        )
        ffn_num: int = key(64, "hidden units of an adapter", low=1)
        vpt_type: str = key("deep", "prompts of each block, or of the first one", choices=("deep", "shallow"))
        prompt_token_num: int = key(5, "prompts of a block", low=1)

    class Plan(ClosedForm.Plan):
        def check_backbone(self, backbone: nn.Module) -> None:
            super().check_backbone(backbone)
            if self.config.options.tuning:
                check_transformer(backbone, self.config.convnet_type)

        def adapts(self) -> bool:
            options = self.config.options
            return options.adapt is not False if options.tuning else super().adapts()

    def tuned_backbone(self) -> Backbone:
        options = self.config.options
        vit = self.new_backbone()
        if options.tuning is None:
            return vit
        mark_frozen(vit, ["backbone"])
        tuned = TunedTransformer(vit)
        if options.tuning == "adapter":
            tuned.add_blocks(Adapter, hidden=options.ffn_num)
        elif options.tuning == "ssf":
            tuned.sets.append(Scales(tuned.vit))
        else:
            depth = tuned.depth if options.vpt_type == "deep" else 1
            tuned.sets.append(Prompts(tuned.dim, options.prompt_token_num, depth))
        return tuned  # pyright: ignore[reportReturnType]

    def first_head(self, width: int, classes: int) -> nn.Module:
        return CosineHead(width, classes) if self.config.options.tuning else super().first_head(width, classes)
