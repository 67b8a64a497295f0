from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.prototypical import PYCIL, PrototypeLearner
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase


@register_learner(
    "ssre", **PYCIL, batch_size=128, convnet_type="resnet18_rep", init_weight_decay=5e-4, weight_decay=5e-4
)
class SSRE(PrototypeLearner):
    """SSRE (Zhu et al., CVPR 2022): later tasks train only 1x1 adapters beside convolutions, and the head.

    After each task the adapters are folded into the convolutions, so the network does not grow. The more similar an
    image is to a prototype of an old class, the more its features are distilled and the less its class counts. In PyCIL
    the similarity itself is the weight, and not, as in the paper, whether it is above a threshold.
    """

    @dataclass(frozen=True)
    class Options(PrototypeLearner.Options):
        lambda_fkd: float = key(1.0, "weight of the distillation of features", low=0, decides="later tasks")
        init_batch_size: int = key(64, "images in a batch of the first task", low=1, like="batch_size")
        autoaugment: str = key(
            "second",
            "task that is trained with AutoAugment: the `second`, as in PyCIL, the `first`, which its code seems to "
            "intend, or `none`",
            choices=("second", "first", "none"),
        )

    def build(self) -> IncrementalNet:
        return IncrementalNet(adapt(self.new_backbone()))

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index == 1:
            self.freeze_but_adapters()

    def freeze_but_adapters(self) -> None:
        """Mark all else of the backbone as frozen; batch norm keeps its statistics."""
        adapters = [conv.adapter for conv in adapters_of(self.network.backbone)]
        for module in self.network.backbone.modules():
            if module not in adapters:
                vars(module).update(
                    frozen=True, frozen_parameters={name for name, _ in module.named_parameters(recurse=False)}
                )

    def phases(self, task: Task) -> Iterator[Phase]:
        options = self.config.options
        for phase in super().phases(task):
            if not task.index:
                phase = replace(phase, batch_size=options.init_batch_size)
            if options.autoaugment == {0: "first", 1: "second"}.get(task.index):
                phase = replace(phase, augmentation="autoaugment")
            yield phase

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options, smoothing = self.config.options, self.config.label_smoothing
        before = self.old_features(batch.images)
        features = self.network.extract(batch.images).float()
        logits = self.network.classify(features).float()
        if before is None:
            return self.scaled_cross_entropy(logits, batch.targets), logits
        similarity = self.similarity(features.detach())
        errors = cross_entropy(logits / options.temp, batch.targets, reduction="none", label_smoothing=smoothing)
        distances = (features - before).norm(dim=1)
        loss = (self.over.weighted(errors) * (1 - similarity)).mean() + options.lambda_fkd * self.over.sum(
            distances * similarity, batch
        )
        return loss + options.lambda_proto * self.prototype_loss(*batch.drawn), logits

    def similarity(self, features: Tensor) -> Tensor:
        """The largest cosine of each row of ``features`` (B, d) with the prototype of an old class: (B,)."""
        return (normalize(features) @ normalize(self.prototypes[: self.num_old]).T).float().amax(1)

    def prototype_loss(self, chosen: Tensor) -> Tensor:
        """The cross-entropy of the prototypes of the classes ``chosen`` (n,)."""
        return self.scaled_cross_entropy(self.network.head(self.prototypes[chosen]), chosen, weighted=False)

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        conv: AdaptedConv2d
        for conv in adapters_of(self.network.backbone):
            conv.fold()


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
