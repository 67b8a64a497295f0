"""PyCIL's backbones under PyCIL's names, for scripts written for it. Nothing in ``pycil_wsc`` imports this."""

from torch import Tensor, nn


class Convnet(nn.Module):
    """A backbone with PyCIL's interface: images -> {"fmaps": output of each stage, "features": (B, d)}."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.out_dim: int = backbone.out_dim  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, images: Tensor) -> dict:
        x, fmaps = self.backbone.get_submodule("stem")(images), []
        for name, stage in self.backbone.named_children():
            if name.startswith("stage"):
                x = stage(x)
                fmaps.append(x)
        return {"fmaps": fmaps, "features": self.backbone.get_submodule("pool")(x)}
