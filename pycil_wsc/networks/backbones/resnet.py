"""torchvision's ResNet-18 without its classifier, with an explicit choice of stem."""

from typing import Any

from torch import nn

from pycil_wsc.networks.backbones.staged import GlobalAverage, StagedBackbone
from pycil_wsc.registry import register_backbone

STEMS = {
    "imagenet": lambda width: [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ],
    "cifar": lambda width: [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ],
    "small": lambda width: [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ],
}


def stem_layers(stem: str, width: int = 64) -> nn.Sequential:
    """The layers before the first stage, which has ``width`` channels; raises ValueError for an unknown name."""
    if stem not in STEMS:
        raise ValueError(f"stem='{stem}' is not one of {', '.join(STEMS)}")
    return nn.Sequential(*STEMS[stem](width))


def narrowed(width: int) -> Any:
    """torchvision's ResNet-18 whose first stage has ``width`` channels, and each further one twice as many.

    Only its stages are of this width. At 64 they are torchvision's, bit for bit.
    """
    from torchvision.models.resnet import BasicBlock, ResNet  # slow to import, and not needed to plan runs

    class Narrowed(ResNet):
        def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
            if planes == 64:  # the first stage, which gets what the stem gives
                self.inplanes = width
            return super()._make_layer(block, planes * width // 64, *args, **options)

    return Narrowed(BasicBlock, [2, 2, 2, 2])


class ResNet18(StagedBackbone):
    """(B, 3, H, W) normalised images -> (B, 8 * width) features.

    ``stem``: ``imagenet`` is 7x7 stride 2 and max-pool (11,176,512 parameters in all), ``cifar`` 3x3 stride 1 without
    pooling (11,168,832), ``small`` 3x3 stride 1 with max-pool; 8,393,728 of them are the last stage's. PyCIL chooses
    among the stems by data set and task split. ``width`` is the number of channels of the first stage, at least 1.
    Raises ValueError for another stem or width.
    """

    def __init__(self, stem: str = "imagenet", width: int = 64):
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width}: give at least 1 channel")
        self.out_dim = 8 * width
        net = narrowed(width)
        self.stem = stem_layers(stem, width)
        nn.init.kaiming_normal_(self.stem[0].get_parameter("weight"), mode="fan_out", nonlinearity="relu")
        self.stage1, self.stage2, self.stage3, self.stage4 = net.layer1, net.layer2, net.layer3, net.layer4
        self.pool = GlobalAverage()


@register_backbone("resnet18")
def resnet18(stem: str = "imagenet", width: int = 64) -> ResNet18:
    """ResNet-18; ``stem`` and ``width`` as for :class:`ResNet18`."""
    return ResNet18(stem, width)


@register_backbone("resnet18_cifar")
def resnet18_cifar() -> ResNet18:
    """ResNet-18 with the stem ``cifar``, for images of about 32 pixels. No arguments."""
    return ResNet18("cifar")


@register_backbone("resnet18_small")
def resnet18_small() -> ResNet18:
    """ResNet-18 with the stem ``small``. No arguments."""
    return ResNet18("small")


@register_backbone("resnet18_cbam")
def resnet18_cbam(stem: str = "cifar") -> ResNet18:
    """PyCIL's ResNet-18 for PASS and IL2A; ``stem`` as for :class:`ResNet18`.

    It carries the layers of CBAM (Woo et al., 2018), but its blocks do not use them; they are left out.
    """
    return ResNet18(stem)
