from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from typing_extensions import Unpack

from pycil_wsc.data.memory.exemplar_selection import normalise
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments


@register_learner("icarl", epochs=170, milestones=[80, 120])
class ICaRL(DistillingLearner):
    """iCaRL (Rebuffi et al., 2017) with PyCIL's softmax losses: cross-entropy, and distillation of the old logits.

    With ``probabilities`` ``sigmoid`` the loss is the paper's and Mammoth's: binary cross-entropy of each class, whose
    target is the label, or for an old class the teacher's output. In Mammoth classes to come are among them (``head``).
    It answers by the nearest mean of exemplars, and adds 1e-5 times the sum of squared weights to the loss: here
    ``weight_decay`` 2e-5.
    """

    @dataclass(frozen=True)
    class Options:
        distill: float = key(1.0, "weight of the distillation, with `softmax`", low=0, decides="later tasks")
        T: float = key(2.0, "temperature of the distillation, with `softmax`", above=0, decides="later tasks")
        probabilities: str = key(
            "softmax",
            "loss over all classes together (`softmax`, as PyCIL), or over each alone (`sigmoid`, as the paper and"
            " Mammoth)",
            choices=("softmax", "sigmoid"),
            decides="later tasks",  # and with `sigmoid` no other method shares the first one
        )
        mirrored_means: bool = key(
            False,
            "the nearest mean is that of exemplars and of their mirror images, as in the paper and Mammoth",
            decides="later tasks",
        )

    class Plan(DistillingLearner.Plan):
        any_head = True

        @property
        def plain_first_task(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.config.options.probabilities == "softmax"

        def check(self) -> str | None:
            if self.config.options.probabilities == "sigmoid" and self.config.label_smoothing:
                return "label_smoothing: has no part in the loss with probabilities 'sigmoid'; leave it out"
            return super().check()

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.mirrors = False  # whether features are those of mirror images

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options = self.config.options
        soft = self.teach(batch.images)
        logits = self.network(batch.images).float()
        if options.probabilities == "sigmoid":
            return self.of_each_class(logits, soft, batch.targets), logits
        loss = self.over.cross_entropy(logits, batch.targets)
        if soft is not None:
            loss = loss + options.distill * distillation(logits[:, : self.num_old], soft[:, : self.num_old], options.T)
        return loss, logits

    def of_each_class(self, logits: Tensor, soft: Tensor | None, targets: Tensor) -> Tensor:
        """The mean binary cross-entropy; ``soft``: the teacher's logits."""
        wanted = one_hot(targets, logits.shape[1]).to(logits.dtype)
        if soft is not None:
            wanted = torch.cat([soft[:, : self.num_old].float().sigmoid(), wanted[:, self.num_old :]], 1)
        return binary_cross_entropy_with_logits(logits, wanted)

    def extract(self, images: Tensor) -> Tensor:
        return super().extract(images.flip(3) if self.mirrors else images)

    def class_means(self, num_seen: int) -> np.ndarray | None:
        means = super().class_means(num_seen)
        if means is None or not self.config.options.mirrored_means:
            return means
        indices = self.memory.indices
        targets = self.manager.train_targets[indices]
        both = []
        for self.mirrors in (True, False):
            features = normalise(self.outputs.features(indices))
            both.append(np.stack([features[targets == label].mean(0) for label in range(num_seen)]))
        return normalise(np.mean(both, axis=0))
