from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycil_wsc import registry
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.tuning.modules import BRANCH, Adapter, LoRA, Prefix
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.optimizers.parameter_groups import apart
from pycil_wsc.training.phase import Phase


@register_learner(
    "lae",
    convnet_type="timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    pretrained=True,
    freeze=["backbone"],
    optimizer="adam",
    **dict.fromkeys(("init_epoch", "epochs"), 5),
    **dict.fromkeys(("init_lr", "lrate"), 0.0028125),
    **dict.fromkeys(("init_milestones", "milestones"), []),
    **dict.fromkeys(("init_weight_decay", "weight_decay"), 0.0),
    memory_per_class=0,
    memory_size=0,
    nme=False,
)
class LAE(BaseLearner):
    """LAE (Gao et al., ICCV 2023, https://arxiv.org/abs/2303.10070): learning, accumulation, ensemble.

    Small modules in the first blocks learn, the online model; their exponential moving average over all tasks is the
    offline model. A class's score is the larger of the two models' probabilities. A task first trains the head alone.

    As in PILOT the first task begins with the head alone, too (``freeze_first_task``); in the paper it does not. As in
    the paper ``pet_cls`` may be ``Adapter`` or ``LoRA``: PILOT attaches the one where it has no effect, and stops at
    the other. A learning rate that falls does so in later tasks, too, also with ``reinit_optimizer``.
    """

    @dataclass(frozen=True)
    class Options:
        pet_cls: str = key(
            "Prefix",
            "what is learned: `Prefix`, further keys and values; `Adapter`, beside the attention; or `LoRA`, of keys "
            "and values",
            choices=("Prefix", "Adapter", "LoRA"),
        )
        pet_length: int = key(10, "the keys and values of `Prefix`", low=1)
        down_sample_dim: int = key(5, "hidden units of `Adapter`, rank of `LoRA`", low=1)
        pet_blocks: int = key(5, "the first so many blocks have such modules", low=1)
        ema_decay: float = key(
            0.9999, "what each step multiplies the share of earlier weights in the offline model by", low=0, below=1
        )
        num_freeze_epochs: int = key(3, "epochs at the start of a task that train the head alone", low=0)
        freeze_first_task: bool = key(True, "the first task also has such epochs; false: as in the paper")

    class Plan(BaseLearner.Plan):
        tunes = True
        averages = True
        one_phase = False

    network: "OnlineOfflineNet"

    def build(self) -> "OnlineOfflineNet":
        return OnlineOfflineNet(TunedTransformer(self.new_backbone()), self.config.options)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def phases(self, task: Task) -> Iterator[Phase]:
        options = self.config.options
        online = self.network.online.requires_grad_(True)
        main = self.main_phase(task)
        groups = apart(main.optimizer.param_groups, online.parameters())  # those that begin later
        main = replace(main, optimizer=registry.optimizers[self.config.optimizer](groups, self.config))
        frozen = min(options.num_freeze_epochs, main.epochs)
        if not task.index and not options.freeze_first_task:
            frozen = 0
        if frozen:
            online.requires_grad_(False)
            yield replace(main, name="head", epochs=frozen)
        online.requires_grad_(True)
        if frozen < main.epochs:  # with the same optimiser, as one schedule
            yield replace(main, epochs=main.epochs - frozen, lr=lambda epoch: main.lr(epoch + frozen))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the online model over the logits of the task; of all classes once there are exemplars."""
        logits = self.network.head(self.network.backbone(batch.images, route=ONLINE))
        first = 0 if len(self.memory) else self.first
        return self.over.cross_entropy(logits[:, first:].float(), batch.targets - first), logits

    @torch.no_grad()
    def after_step(self) -> None:
        offline: list[Tensor] = list(self.network.offline.parameters())
        online: list[Tensor] = list(self.network.online.parameters())
        torch._foreach_lerp_(offline, online, 1 - self.config.options.ema_decay)


ONLINE, OFFLINE = range(2)  # the sets of modules


class OnlineOfflineNet(IncrementalNet):
    """Features with two sets of modules, and one head for both: (B, 3, H, W) -> (B, 2 d)."""

    backbone: TunedTransformer

    def __init__(self, backbone: TunedTransformer, options: LAE.Options):
        super().__init__(backbone)
        kind, arguments = _module(options)
        for _ in (ONLINE, OFFLINE):
            backbone.add_blocks(kind, blocks=range(min(options.pet_blocks, backbone.depth)), **arguments)
        self.offline.load_state_dict(self.online.state_dict())
        self.offline.requires_grad_(False)

    @property
    def online(self) -> nn.Module:
        return self.backbone.sets[ONLINE]

    @property
    def offline(self) -> nn.Module:
        return self.backbone.sets[OFFLINE]

    def extract(self, images: Tensor) -> Tensor:
        return torch.cat([self.backbone(images, route=route) for route in (ONLINE, OFFLINE)], 1)

    def classify(self, features: Tensor) -> Tensor:
        """(B, 2 d) -> (B, classes): the logarithm of the larger probability, from the logits of both models."""
        online, offline = (self.head(part).float().log_softmax(1) for part in features.chunk(2, 1))
        return torch.maximum(online, offline)


def _module(options: LAE.Options) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the modules, and its arguments."""
    if options.pet_cls == "Prefix":
        return Prefix, {"length": options.pet_length}
    if options.pet_cls == "LoRA":
        return LoRA, {"rank": options.down_sample_dim}
    beside = {"mode": BRANCH, "place": "attn", "scale": None, "dropout": 0.0}
    return Adapter, {"hidden": options.down_sample_dim, "act": nn.GELU, **beside}
