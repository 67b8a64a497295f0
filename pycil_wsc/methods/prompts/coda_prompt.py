import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prompts.prompted import AS_PILOT, PromptedLearner, PromptedNet
from pycil_wsc.networks.heads import LinearHead
from pycil_wsc.networks.tuning.pools import Components
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.optimizers.schedules import Schedule
from pycil_wsc.training.phase import Phase

USUAL_TASKS = 10  # of benchmarks, where it is not known how many will come


class CodaNet(PromptedNet):
    """A prompt for each of some blocks, mixed from components by each image's features."""

    def __init__(self, backbone: TunedTransformer, options: Any, per_task: int):
        length = int(options.prompt_param[1])
        self.blocks = [index for index in options.prompt_layers if index < backbone.depth]
        parts = [Components(per_task, length, backbone.dim) for _ in self.blocks]
        super().__init__(backbone, LinearHead, nn.ModuleList(parts))

    def grow(self, num_classes: int) -> None:
        super().grow(num_classes)
        for part in self.components:
            part.grow()

    @property
    def components(self) -> list[Components]:
        return list(self.prompts)  # pyright: ignore[reportReturnType, reportArgumentType]

    def prompted(self, images: Tensor, queries: Tensor) -> Tensor:
        prefixes = {}
        for index, part in zip(self.blocks, self.components):
            prompt = part(queries)  # (B, length, dim)
            half = prompt.shape[1] // 2
            prefixes[index] = prompt[:, :half], prompt[:, half:]
        return self.backbone(images, prefixes=prefixes)

    def penalty(self) -> Tensor:
        return torch.stack([part.penalty() for part in self.components]).sum()


@register_learner(
    "coda_prompt",
    **AS_PILOT,
    init_epoch=20,
    epochs=20,
    init_lr=0.001,
    lrate=0.001,
    scheduler="cosine",
    batch_size=128,
)
class CodaPrompt(PromptedLearner):
    """CODA-Prompt (Smith et al., CVPR 2023): keys and values before those of the tokens, mixed from components.

    Each task adds components, which are orthogonal to those before. With ``scheduler: cosine`` the learning rate is
    that of the authors' code and PILOT's: constant for two epochs, then along most of a quarter of a cosine, one epoch
    late. PILOT leaves the last, smaller batch of an epoch out; here no image is left out.
    """

    @dataclass(frozen=True)
    class Options:
        prompt_param: tuple[float, ...] = key(
            (100, 8, 0.0),
            "components of all tasks together (in a `Learner`, of ten), keys and values of a prompt together, and the "
            "weight of the penalty for components that are not orthogonal",
            low=0,
        )
        prompt_layers: tuple[int, ...] = key((0, 1, 2, 3, 4), "blocks with prompts, from 0; others are left out", low=0)

    network: CodaNet  # pyright: ignore[reportIncompatibleVariableOverride]

    class Plan(PromptedLearner.Plan):
        def check(self) -> str | None:
            param = self.config.options.prompt_param
            if len(param) != 3 or param[0] < 1 or param[1] < 2 or param[1] % 2 or int(param[0]) != param[0]:
                return "prompt_param: is [components, an even length, weight of the penalty], such as [100, 8, 0]"
            return super().check()

    def build(self) -> CodaNet:
        options = self.config.options
        tasks = USUAL_TASKS if self.manager.open_ended else len(self.manager.tasks)
        per_task = max(1, int(options.prompt_param[0]) // tasks)
        return CodaNet(TunedTransformer(self.new_backbone()), options, per_task)

    def phases(self, task: Task) -> Iterator[Phase]:
        (phase,) = super().phases(task)
        if self.config.scheduler == "cosine":
            base = self.config.lrate if task.index else self.config.init_lr
            phase = replace(phase, lr=late_cosine(base, phase.epochs))
        yield phase

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.network.prompted(batch.images, self.queries(batch))
        logits = self.network.classify(features)
        loss = self.error(logits, batch)
        weight = self.config.options.prompt_param[2]
        if weight:
            loss = loss + weight * self.network.penalty().float()
        return loss, logits


def late_cosine(base: float, epochs: int) -> Schedule:
    """``base * cos(0.495 pi (e - 1) / (epochs - 1))`` from epoch 1 on, ``base`` before."""
    if epochs == 1:
        return lambda epoch: base
    return lambda epoch: base * math.cos(99 * math.pi * max(0, epoch - 1) / (200 * (epochs - 1)))
