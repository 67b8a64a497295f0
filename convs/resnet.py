"""ResNet-18, as ``from convs.resnet import resnet18``; ``args`` determine its stem, as in PyCIL."""

from collections.abc import Mapping
from typing import Any

from convs import Convnet
from pycil_wsc.errors import UserError
from pycil_wsc.networks.backbones.resnet import ResNet18


def resnet18(pretrained: bool = False, progress: bool = True, args: Mapping[str, Any] | None = None) -> Convnet:
    """``args``: PyCIL's; ``dataset``, ``init_cls`` and ``increment`` determine the stem."""
    if pretrained:
        raise UserError("resnet18: pretrained weights are not included; use pretrained=False")
    if args is None:
        raise UserError("resnet18: pass PyCIL's args, which determine the stem")
    return Convnet(ResNet18(stem(args)))


def stem(args: Mapping[str, Any]) -> str:
    """The first layers of ResNet-18 with PyCIL's ``args``: those for ``imagenet``, for ``cifar``, or ``small`` ones."""
    if "cifar" in args["dataset"]:
        return "imagenet" if args.get("model_name") == "memo" else "cifar"
    return "imagenet" if args["init_cls"] == args["increment"] else "small"
