"""The CIFAR ResNet for cosine classifiers (Hou et al., 2019): features that may be negative, and learned shortcuts."""

import torch.nn.functional as F
from torch import Tensor, nn

from pycil_wsc.networks.backbones.cifar_resnet import BasicBlock, CifarResNet
from pycil_wsc.registry import register_backbone


class LearnedShortcutBlock(BasicBlock):
    """A basic block whose shortcut is a 1x1 convolution and batch norm where the shape changes ("option B")."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__(in_channels, out_channels, stride)
        self.rectify = True  # not in the network's last block
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or self.new_channels:
            convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out, inplace=True) if self.rectify else out


class CosineResNet(CifarResNet):
    """(B, 3, H, W) normalised images -> (B, 4 * width) features; see :class:`CifarResNet`."""

    def __init__(self, depth: int, width: int = 16):
        super().__init__(depth, width, LearnedShortcutBlock)
        last = self.stage3[-1]
        assert isinstance(last, LearnedShortcutBlock)
        last.rectify = False


@register_backbone("cosine_resnet32")
def cosine_resnet32(width: int = 16) -> CosineResNet:
    """ResNet-32 for cosine classifiers; ``width`` as for :class:`CifarResNet`."""
    return CosineResNet(32, width)
