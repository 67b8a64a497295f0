import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.joint import Joint
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments


@register_learner(
    "gdumb",
    batch_size=16,
    init_epoch=256,
    init_lr=0.05,
    init_milestones=[],
    init_weight_decay=1e-6,
    epochs=256,
    lrate=0.05,
    milestones=[],
    weight_decay=1e-6,
    min_lr=5e-4,
    scheduler="restarts",
    clip_norm=10.0,
    exemplars="random",
)
class GDumb(Joint):
    """Greedy sampler and dumb learner (Prabhu et al., ECCV 2020,
    https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123470511.pdf).

    A balanced memory, drawn at random, on which new weights are trained for each task: the task's other samples are
    not used. Constants and CutMix (Yun et al., 2019) are those of the authors' code for CIFAR.
    The accuracy is that of the last epoch; the authors report the best of all epochs.
    """

    @dataclass(frozen=True)
    class Options:
        cutmix: float = key(0.5, "fraction of the batches that CutMix mixes (0.5 in the authors' code)", low=0, high=1)

    class Plan(Joint.Plan):
        plain_first_task = False
        needs_exemplars = True
        chooses_first = True
        mixes = False

        def new_samples(self, task: Task, targets: np.ndarray) -> np.ndarray:
            return np.empty(0, np.int64)  # those that it trains on are in the memory already

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.partners: Tensor | None = None  # the labels of the images that were pasted into those of the batch
        self.share: Tensor | None = None  # the weight of the batch's own labels: a scalar

    def before_step(self, batch: Batch) -> Batch:
        order = torch.randperm(len(batch), device=self.device)
        images, share = cutmix(batch.images, order)
        chosen = torch.rand((), device=self.device) < self.config.options.cutmix
        self.partners, self.share = batch.targets[order], torch.where(chosen, share, 1)
        return dataclasses.replace(batch, images=torch.where(chosen, images, batch.images))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        if self.partners is None or self.share is None:
            return self.over.cross_entropy(logits.float(), batch.targets), logits
        of_images = self.over.cross_entropy(logits.float(), batch.targets, batch.targets)
        of_pasted = self.over.cross_entropy(logits.float(), self.partners, self.partners)
        return self.share * of_images + (1 - self.share) * of_pasted, logits


def cutmix(images: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Paste a random box of the images ``images[order]`` into ``images``: (B, 3, H, W), the share that is left.

    The box has the image's proportions, a uniform area (Beta(1, 1)) and a uniform centre, and is cut off at the edges.
    Random numbers are drawn on the device.
    """
    height, width = images.shape[-2:]
    side = torch.rand((), device=images.device).sqrt()
    inside = []
    for length in (height, width):
        centre = torch.randint(length, (), device=images.device)
        half = (side * length).long() // 2
        places = torch.arange(length, device=images.device)
        inside.append((places >= centre - half) & (places < centre + half))
    box = inside[0][:, None] & inside[1]
    return torch.where(box, images[order], images), 1 - box.float().mean()
