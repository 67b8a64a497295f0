"""PyCIL's backbones under PyCIL's names, for scripts written for it. Nothing in ``pycil_wsc`` imports this."""

from torch import Tensor, nn

from pycil_wsc.networks.backbones.staged import StagedBackbone


class Convnet(nn.Module):
    """A backbone with PyCIL's interface: images -> {"fmaps": output of each stage, "features": (B, d)}."""

    def __init__(self, backbone: StagedBackbone):
        super().__init__()
        self.backbone = backbone
        self.out_dim = backbone.out_dim

    def forward(self, images: Tensor) -> dict:
        features, fmaps = self.backbone.forward_stages(images)
        return {"fmaps": fmaps, "features": features}
