from pycil_wsc.learners.der import DER
from pycil_wsc.networks.nets import ExpandingNet
from pycil_wsc.registry import register_learner


@register_learner("memo", epochs=170, milestones=[80, 120, 150], alpha_aux=1.0, train_base=True, train_adaptive=False)
class MEMO(DER):
    """MEMO (Zhou et al., 2023): DER whose tasks share all of the backbone but its last stage.

    ``train_base``: the shared trunk goes on learning after the first task, also from what reaches it through the old blocks;
    ``train_adaptive``: so do the old blocks. PyCIL's defaults.
    """

    def build(self):
        return ExpandingNet(self.config.convnet_type, share_trunk=True)

    def grow(self, task):
        super().grow(task)
        self.network.trunk.requires_grad_(self.config.options.train_base or not task.index)
        self.network.blocks.requires_grad_(True)
        self.network.blocks[:-1].requires_grad_(self.config.options.train_adaptive)
