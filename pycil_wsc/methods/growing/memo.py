from dataclasses import dataclass
from typing import Any

from torch import nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.keys import key
from pycil_wsc.methods.growing.der import DER
from pycil_wsc.networks.nets import ExpandingNet
from pycil_wsc.networks.timm_models import is_timm, is_transformer
from pycil_wsc.registry import register_learner


@register_learner("memo", epochs=170, milestones=[80, 120, 150])
class MEMO(DER):
    """MEMO (Zhou et al., 2023): DER in which tasks share the backbone except its last stage. PyCIL's defaults.

    The last stage of a vision transformer is its last block, as in PILOT.
    """

    @dataclass(frozen=True)
    class Options(DER.Options):
        train_base: bool = key(
            True,
            "train the shared trunk in later tasks too, also by gradients through the old blocks",
            decides="later tasks",
        )
        train_adaptive: bool = key(False, "train the blocks of earlier tasks too", decides="later tasks")
        pretrained_block: bool = key(
            True,
            "the last block of a transformer begins pre-trained, too; false: with random weights, as in PILOT",
            decides="later tasks",  # with false, the first task is not shared
        )

    class Plan(DER.Plan):
        @property
        def plain_first_task(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.config.options.pretrained_block

        def check(self) -> str | None:
            transformer = is_transformer(self.config.convnet_type)
            if is_timm(self.config.convnet_type) and not transformer:
                return (
                    f"model_name: 'memo' splits the backbone, which '{self.config.convnet_type}' does not support; "
                    "use 'der', a built-in backbone or a vision transformer (timm:vit_...)"
                )
            if not transformer and not self.config.options.pretrained_block:
                return "pretrained_block: is of a transformer (timm:vit_...); leave it out"
            return super().check()

        def check_backbone(self, backbone: nn.Module) -> None:
            if not hasattr(backbone, "split"):
                raise UserError(
                    f"convnet_type: '{self.config.convnet_type}' has no split() into a shared trunk and a block per "
                    "task, which MEMO needs; use another backbone or another learner"
                )

    def build(self) -> nn.Module:
        backbone = self.new_backbone()
        self.plan.check_backbone(backbone)
        network = ExpandingNet(backbone, share_trunk=True)
        if not self.config.options.pretrained_block:
            first: Any = network.blocks[0]
            for module in first.block.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        return network

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.network.trunk.requires_grad_(self.config.options.train_base or not task.index)
        self.network.blocks[:-1].requires_grad_(self.config.options.train_adaptive)
