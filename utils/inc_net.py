"""PyCIL's network with a growing head, which returns features and logits in a dict."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from convs import Convnet, cifar_resnet
from convs.linears import SimpleLinear
from convs.resnet import resnet18
from pycil_wsc.errors import UserError


def get_convnet(args: Mapping[str, Any], pretrained: bool = False) -> Convnet:
    """The backbone that ``args["convnet_type"]`` names."""
    name = args["convnet_type"].lower()
    if name == "resnet18":
        return resnet18(pretrained=pretrained, args=args)
    if name == "resnet32":
        return cifar_resnet.resnet32()
    raise UserError(f"convnet_type: '{name}' is not available here; known: resnet18, resnet32")


class BaseNet(nn.Module):
    """(B, 3, H, W) -> {"fmaps", "features", "logits"}: ``convnet`` and a head ``fc``, for classes of your own."""

    def __init__(self, args: Mapping[str, Any], pretrained: bool = False):
        super().__init__()
        self.convnet: Convnet = get_convnet(args, pretrained)
        self.fc: SimpleLinear | None = None

    @property
    def feature_dim(self) -> int:
        return self.convnet.out_dim

    def extract_vector(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, feature_dim)."""
        return self.convnet(x)["features"]

    def forward(self, x: Tensor) -> dict:
        out = self.convnet(x)
        return out | self._head()(out["features"])

    def copy(self) -> "BaseNet":
        return copy.deepcopy(self)

    def freeze(self) -> "BaseNet":
        return self.requires_grad_(False).eval()

    def _head(self) -> SimpleLinear:
        if self.fc is None:
            raise UserError(f"{type(self).__name__}: there is no head yet; call update_fc(nb_classes) first")
        return self.fc


class IncrementalNet(BaseNet):
    """A :class:`BaseNet` with a head that ``update_fc`` grows."""

    def __init__(self, args: Mapping[str, Any], pretrained: bool = False, gradcam: bool = False):
        if gradcam:
            raise UserError("IncrementalNet: Grad-CAM hooks are not available here; use gradcam=False")
        super().__init__(args, pretrained)

    def generate_fc(self, in_dim: int, out_dim: int) -> SimpleLinear:
        return SimpleLinear(in_dim, out_dim)

    def update_fc(self, nb_classes: int) -> None:
        """Grow the head to ``nb_classes``; the rows of known classes are unchanged."""
        device = next(self.parameters()).device
        old, self.fc = self.fc, self.generate_fc(self.feature_dim, nb_classes).to(device)
        if old is not None:
            with torch.no_grad():
                self.fc.weight[: old.out_features] = old.weight
                self.fc.bias[: old.out_features] = old.bias

    def weight_align(self, increment: int) -> None:
        """Scale the rows of the newest ``increment`` classes to the mean norm of the others."""
        head = self._head()
        head.align(head.out_features - increment)
