"""The ResNet-18 of SSRE (Zhu et al., 2022): convolutions with biases, to which adapters can be added, and no batch norm
in its shortcuts.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pycil_wsc.networks.backbones.cifar_resnet import BasicBlock, stage
from pycil_wsc.networks.backbones.resnet import stem_layers
from pycil_wsc.networks.backbones.staged import GlobalAverage, StagedBackbone
from pycil_wsc.registry import register_backbone


class BiasedBlock(BasicBlock):
    """A basic block of convolutions with biases; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__(in_channels, out_channels, stride)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or self.new_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet18Rep(StagedBackbone):
    """(B, 3, H, W) normalised images -> (B, 512) features; ``stem`` as for :class:`~.resnet.ResNet18`."""

    out_dim = 512

    def __init__(self, stem: str = "cifar"):
        super().__init__()
        self.stem = stem_layers(stem)
        self.stage1 = stage(64, 64, 2, 1, BiasedBlock)
        self.stage2 = stage(64, 128, 2, 2, BiasedBlock)
        self.stage3 = stage(128, 256, 2, 2, BiasedBlock)
        self.stage4 = stage(256, 512, 2, 2, BiasedBlock)
        self.pool = GlobalAverage()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@register_backbone("resnet18_rep")
def resnet18_rep(stem: str = "cifar") -> ResNet18Rep:
    """SSRE's ResNet-18; ``stem`` as for :class:`ResNet18Rep`."""
    return ResNet18Rep(stem)
