import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.methods.prototypes.prototypical import PYCIL, PrototypeLearner
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch, rotated
from pycil_wsc.training.learner import Arguments


class RotationNet(IncrementalNet):
    """A head with a row for each class and rotation by 0, 90, 180 or 270 degrees. Unrotated images are classified."""

    def grow(self, num_classes: int) -> None:
        super().grow(4 * num_classes)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)[:, ::4]


@register_learner(
    "pass", **PYCIL, batch_size=64, convnet_type="resnet18_cbam", init_weight_decay=2e-4, weight_decay=2e-4
)
class PASS(PrototypeLearner):
    """PASS (Zhu et al., CVPR 2021): a class and its three rotations are four classes.

    Old classes are prototypes with Gaussian noise. Its variance is the mean over classes and features of the variance
    of the features of a class. The distillation is a norm over the batch, as in PyCIL; with fewer old classes than new
    ones, PyCIL's gives NaN.
    """

    two_passes = True
    variances: Tensor  # of each class, the mean over features: (classes,)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.register_rows("variances")

    def build(self) -> "RotationNet":
        return RotationNet(self.new_backbone())

    def draw(self, generator: torch.Generator, times: int = 1) -> tuple[Tensor, ...]:
        """Random old classes (n,), n = ``batch_size`` x max(1, old // new), and standard normal noise (n, d)."""
        (chosen,) = super().draw(generator, max(1, self.num_old // max(1, self.num_seen - self.num_old)))
        shape = len(chosen), self.prototypes.shape[1]
        return chosen, torch.randn(shape, generator=generator, device=self.device)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, turns = rotated(batch)
        before = self.old_features(images)
        features = self.network.extract(images)
        logits = self.network.head(features)
        classes = batch.targets.repeat_interleave(4)
        loss = self.scaled_cross_entropy(logits, 4 * classes + turns, classes)
        if before is not None:
            options = self.config.options
            distance = self.over.norm((features - before).float(), batch)
            loss = loss + options.lambda_fkd * distance + options.lambda_proto * self.prototype_loss(*batch.drawn)
        return loss, logits[::4, ::4]

    def prototype_loss(self, chosen: Tensor, noise: Tensor) -> Tensor:
        """The cross-entropy of noisy prototypes of the classes ``chosen`` (n,); ``noise`` (n, d) is standard normal."""
        radius = self.variances[: self.num_old].mean().sqrt()
        logits = self.network.head(self.prototypes[chosen] + radius * noise)
        return self.scaled_cross_entropy(logits, 4 * chosen, weighted=False)

    def keep(self, label: int, features: np.ndarray) -> None:
        super().keep(label, features)
        self.variances[label] = float(features.var(0, ddof=min(1, len(features) - 1), dtype=np.float64).mean())
