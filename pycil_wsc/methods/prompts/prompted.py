"""What L2P, DualPrompt and CODA-Prompt share: a frozen transformer is asked twice, for a query and with prompts."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.step.cost import Operations

AS_PILOT = {  # keys that all of them have in PILOT's files and code
    "convnet_type": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    "pretrained": True,
    "freeze": ["backbone"],
    "optimizer": "adam",
    "init_milestones": [],
    "milestones": [],
    "init_weight_decay": 0,
    "weight_decay": 0,
    "memory_per_class": 0,
    "memory_size": 0,
    "nme": False,
}


class PromptedNet(IncrementalNet):
    """A transformer whose prompts depend on its own features of the image; a method says how.

    ``backbone`` is the :class:`.TunedTransformer`.
    """

    backbone: TunedTransformer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, backbone: TunedTransformer, head: type[IncrementalHead], prompts: nn.Module):
        super().__init__(backbone, head)  # pyright: ignore[reportArgumentType]
        self.prompts = prompts

    def queries(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d): the features of the pre-trained transformer, without gradients."""
        return self.backbone.untuned(images)

    def prompted(self, images: Tensor, queries: Tensor) -> Tensor:
        """(B, 3, H, W) images and their (B, d) queries -> (B, d) features of a test."""
        raise NotImplementedError

    def extract(self, images: Tensor) -> Tensor:
        return self.prompted(images, self.queries(images))


class PromptedLearner(BaseLearner):
    """Cross-entropy over the new classes; over all classes seen, once there are exemplars.

    The queries of training images that are not augmented are computed once per task.
    """

    class Plan(BaseLearner.Plan):
        tunes = True

    network: PromptedNet  # pyright: ignore[reportIncompatibleVariableOverride]
    query_table: Tensor | None = None  # the queries of the phase's images, if they are not augmented

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def begin_task(self, task: Task) -> None:
        self.query_table = None
        if not augments(self):
            with Operations() as operations:
                self.query_table = self.queries_of(self.batches.indices(task))
            self.spent.operations += self.processes.count * operations.total

    def phases(self, task: Task) -> Iterator[Phase]:
        phase = self.main_phase(task)
        if self.query_table is None and not augments(self):  # a run resumes, which has counted this pass
            self.query_table = self.queries_of(phase.indices)
        yield phase

    @torch.no_grad()
    def queries_of(self, indices: np.ndarray) -> Tensor:
        """The queries of training images, in the rows of their numbers: (N, d), 0 elsewhere."""
        self.eval()
        parts = []
        for images, _ in self.batches.plain(indices):
            with self.precision.autocast():
                parts.append(self.network.queries(images).float())
        queries = torch.cat(parts)
        table = queries.new_zeros(len(self.manager.train_targets), queries.shape[1])
        table[torch.from_numpy(indices).to(self.device)] = queries
        return table

    def queries(self, batch: Batch) -> Tensor:
        """The queries of a batch's images: (B, d)."""
        if self.query_table is not None:
            return self.query_table[batch.indices]
        return self.network.queries(batch.images)

    def error(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean cross-entropy of (B, classes) logits."""
        first = 0 if len(self.memory) else self.first
        return self.over.cross_entropy(logits[:, first:].float(), batch.targets - first)


def augments(learner: BaseLearner) -> bool:
    """Whether a training image differs from pass to pass."""
    info = learner.batches.source.info
    moved = info.crop != "pad" or info.padding or info.flip or info.brightness
    return bool(moved) or learner.config.augmentation != "pycil"
