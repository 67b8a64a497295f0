"""APER (Zhou et al., IJCV 2024): a transformer is tuned on the first task, and a class is then its mean feature."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.pretrained.simplecil import SimpleCIL
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.tuning.modules import Adapter
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase

AS_PILOT = {
    "convnet_type": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    "pretrained": True,
    "freeze": ["backbone"],
    "init_epoch": 20,
    "init_lr": 0.01,
    "init_weight_decay": 5e-4,
    "init_milestones": [],
    "milestones": [],
    "scheduler": "cosine",
    "batch_size": 48,
    "nme": False,
}


class TwoFoldNet(IncrementalNet):
    """The features of the pre-trained transformer beside those of the tuned one: (B, 2 d)."""

    backbone: TunedTransformer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, backbone: TunedTransformer):
        super().__init__(backbone, lambda dim: CosineHead(2 * dim))  # pyright: ignore[reportArgumentType]
        self.tuning_head = CosineHead(backbone.out_dim)  # with which the first task tunes the transformer
        self.head.requires_grad_(False)

    def grow(self, num_classes: int) -> None:
        super().grow(num_classes)
        self.head.requires_grad_(False)
        if not self.tuning_head.out_features:
            self.tuning_head.grow(num_classes)

    def extract(self, images: Tensor) -> Tensor:
        return torch.cat([self.backbone.untuned(images), self.backbone(images)], 1)


class TunedOnce(SimpleCIL):
    """The base of APER's variants, which say what tunes the transformer."""

    class Plan(SimpleCIL.Plan):
        tunes = True

        def planned_epochs(self, task: Task) -> int:
            return 0 if task.index else self.config.init_epoch

    network: TwoFoldNet  # pyright: ignore[reportIncompatibleVariableOverride]

    def build(self) -> TwoFoldNet:
        backbone = TunedTransformer(self.new_backbone())
        self.tune(backbone)
        return TwoFoldNet(backbone)

    def tune(self, backbone: TunedTransformer) -> None:
        """Add what is trained."""
        raise NotImplementedError

    def phases(self, task: Task) -> Iterator[Phase]:
        if not task.index:
            yield self.main_phase(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network.tuning_head(self.network.backbone(batch.images))
        return self.over.cross_entropy(logits.float(), batch.targets), logits


@register_learner("aper_adapter", **AS_PILOT)
class APERAdapter(TunedOnce):
    """APER with adapters (Zhou et al., IJCV 2024), which are parallel to each block's MLP (AdaptFormer)."""

    @dataclass(frozen=True)
    class Options:
        ffn_num: int = key(64, "hidden units of an adapter", low=1)

    def tune(self, backbone: TunedTransformer) -> None:
        backbone.add_blocks(Adapter, hidden=self.config.options.ffn_num)
