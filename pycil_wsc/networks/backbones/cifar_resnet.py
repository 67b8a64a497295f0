"""The CIFAR ResNets of He et al. (2016), with the parameter-free "option A" shortcut: 8, 20 or 32 layers, 64 features.

ResNet-32 has 463,504 parameters. (PyCIL prints 464,154: its backbone carries a 64 -> 10 linear layer that is never
used.)
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from pycil_wsc.networks.backbones.staged import GlobalAverage, StagedBackbone
from pycil_wsc.registry import register_backbone


class BasicBlock(nn.Module):
    """conv3x3 - BN - ReLU - conv3x3 - BN, plus the shortcut, ReLU: (B, in, H, W) -> (B, out, H/stride, W/stride)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride, self.new_channels = stride, out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.stride > 1:
            x = F.avg_pool2d(x, 1, self.stride)  # every second pixel, in a single operator
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))  # append zero channels
        return F.relu(out + x, inplace=True)


def stage(
    in_channels: int, out_channels: int, blocks: int, stride: int, block: type[nn.Module] = BasicBlock
) -> nn.Sequential:
    """``blocks`` blocks; the first changes width and resolution."""
    first = block(in_channels, out_channels, stride)
    return nn.Sequential(first, *(block(out_channels, out_channels, 1) for _ in range(blocks - 1)))


class CifarResNet(StagedBackbone):
    """(B, 3, H, W) normalised images -> (B, 4 * width) features; H and W at least 4 (32 for CIFAR).

    ``depth`` is 6 n + 2 for n blocks in each stage. ``width`` is the number of channels of the first stage, at least 1;
    the second has twice and the third four times as many. Raises ValueError if it is below 1.

    The last stage has 351,488 of ResNet-32's 463,504 parameters.
    """

    def __init__(self, depth: int, width: int = 16, block: type[nn.Module] = BasicBlock):
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width}: give at least 1 channel")
        blocks, self.out_dim = (depth - 2) // 6, 4 * width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stage1 = stage(width, width, blocks, 1, block)
        self.stage2 = stage(width, 2 * width, blocks, 2, block)
        self.stage3 = stage(2 * width, 4 * width, blocks, 2, block)
        self.pool = GlobalAverage()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al., fan out
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))


@register_backbone("resnet8")
def resnet8(width: int = 16) -> CifarResNet:
    """ResNet-8; ``width`` as for :class:`CifarResNet`."""
    return CifarResNet(8, width)


@register_backbone("resnet20")
def resnet20(width: int = 16) -> CifarResNet:
    """ResNet-20; ``width`` as for :class:`CifarResNet`."""
    return CifarResNet(20, width)


@register_backbone("resnet32")
def resnet32(width: int = 16) -> CifarResNet:
    """ResNet-32; ``width`` as for :class:`CifarResNet`."""
    return CifarResNet(32, width)
