"""1x1 convolutions beside larger ones, into whose weights they can be folded (Zhu et al., 2022)."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Network = TypeVar("Network", bound=nn.Module)


class AdaptedConv2d(nn.Module):
    """A convolution and a 1x1 convolution of the same input, added up: (B, in, H, W) -> (B, out, H', W').

    Both are computed as one convolution, whose kernel has the weights of the second one added at its centre.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        options = {"groups": conv.groups, "bias": conv.bias is not None}
        self.adapter = nn.Conv2d(conv.in_channels, conv.out_channels, 1, **options)
        nn.init.kaiming_normal_(self.adapter.weight, mode="fan_out", nonlinearity="relu")

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of the sum."""
        height, width = (side // 2 for side in self.conv.kernel_size)
        kernel = self.conv.weight + pad(self.adapter.weight, (width, width, height, height))
        bias = None if self.conv.bias is None else self.conv.bias + self.adapter.get_parameter("bias")
        return kernel, bias

    def forward(self, images: Tensor) -> Tensor:
        return self.conv._conv_forward(images, *self.weights())

    @torch.no_grad()
    def fold(self) -> None:
        """Move the adapter into the convolution; its own weights are then 0."""
        kernel, bias = self.weights()
        self.conv.weight.copy_(kernel)
        if self.conv.bias is not None and bias is not None:
            self.conv.bias.copy_(bias)
        for parameter in self.adapter.parameters():
            parameter.zero_()


def adapt(network: Network) -> Network:
    """Give an adapter to each convolution of ``network`` with an odd kernel above 1x1, but the first one, which sees
    colours, and frozen ones. Returns ``network``.
    """
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and _adaptable(child):
                setattr(module, name, AdaptedConv2d(child))
    return network


def adapters_of(network: nn.Module) -> list[AdaptedConv2d]:
    """The convolutions of ``network`` that have adapters."""
    return [module for module in network.modules() if isinstance(module, AdaptedConv2d)]


def _adaptable(conv):
    odd = all(side % 2 for side in conv.kernel_size) and max(conv.kernel_size) > 1
    frozen = getattr(conv, "frozen_parameters", ())
    return type(conv) is nn.Conv2d and odd and conv.in_channels > 3 and conv.padding_mode == "zeros" and not frozen
