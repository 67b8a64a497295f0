"""torchvision's ResNet-18 without its classifier, with an explicit choice of stem."""

from torch import Tensor, nn
from torchvision.models import resnet18 as torchvision_resnet18

from pycil_wsc.networks.backbones.cifar_resnet import GlobalAverage
from pycil_wsc.registry import register_backbone

STEMS = {
    "imagenet": lambda: [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ],
    "cifar": lambda: [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)],
    "small": lambda: [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ],
}


class ResNet18(nn.Module):
    """(B, 3, H, W) normalised images -> (B, 512) features.

    ``stem``: ``imagenet`` is 7x7 stride 2 and max-pool (11,176,512 parameters in all), ``cifar`` 3x3 stride 1 without
    pooling (11,168,832), ``small`` 3x3 stride 1 with max-pool. PyCIL chooses among them by data set and task split.
    Raises ValueError for another stem.
    """

    out_dim = 512

    def __init__(self, stem: str = "imagenet"):
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"stem='{stem}' is not one of {', '.join(STEMS)}")
        net = torchvision_resnet18(weights=None)
        self.stem = nn.Sequential(*STEMS[stem]())
        nn.init.kaiming_normal_(self.stem[0].get_parameter("weight"), mode="fan_out", nonlinearity="relu")
        self.stage1, self.stage2, self.stage3, self.stage4 = net.layer1, net.layer2, net.layer3, net.layer4
        self.pool = GlobalAverage()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.stage4(self.stage3(self.stage2(self.stage1(self.stem(x))))))

    def split(self) -> tuple[nn.Module, nn.Module]:
        """(shared trunk, block of one task), as in MEMO: the block is the last stage, with 8,393,728 parameters."""
        return nn.Sequential(self.stem, self.stage1, self.stage2, self.stage3), nn.Sequential(self.stage4, self.pool)


@register_backbone("resnet18")
def resnet18(stem: str = "imagenet") -> ResNet18:
    """ResNet-18; ``stem`` as for :class:`ResNet18`."""
    return ResNet18(stem)


@register_backbone("resnet18_cifar")
def resnet18_cifar() -> ResNet18:
    """ResNet-18 with the stem ``cifar``, for images of about 32 pixels. No arguments."""
    return ResNet18("cifar")


@register_backbone("resnet18_small")
def resnet18_small() -> ResNet18:
    """ResNet-18 with the stem ``small``. No arguments."""
    return ResNet18("small")
