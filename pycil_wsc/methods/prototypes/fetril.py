from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from pycil_wsc.data.batches.feature_source import FeatureSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.methods.prototypes.class_rows_learner import ClassRows, by_class
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import Phase

DEFAULTS = {"scheduler": "cosine", "epochs": 50, "milestones": [], "lrate": 0.05, "weight_decay": 5e-4, "nme": False}


@register_learner("fetril", augmentation="autoaugment", **DEFAULTS)
class FeTrIL(ClassRows):
    """FeTrIL (Petit et al., WACV 2023, https://arxiv.org/abs/2211.13131): the backbone learns the first task alone.

    In later tasks only the head is trained, on features of the new images. Those of the new class whose mean is most
    similar to an old class's, moved from the one mean to the other, stand for the old one.
    """

    class Plan(ClassRows.Plan):
        uses_memory = False
        one_phase = False
        plain_first_task = True

    means: Tensor  # the mean feature of each class: (classes, d)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.register_rows("means", self.network.backbone.out_dim)

    def phases(self, task: Task) -> Iterator[Phase]:
        phase = self.main_phase(task, self.network.head.parameters() if task.index else None)
        if task.index:
            features, targets = self.translated(task)
            phase = replace(
                phase,
                indices=np.arange(len(features)),
                source=FeatureSource(torch.from_numpy(features), self.device),
                targets=targets,
                images=len(task.train_indices),
                network=self.network.head,
                loss=self.head_loss,
            )
        yield phase

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.head_loss(replace(batch, images=self.network.extract(batch.images)))

    def head_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of features."""
        logits = self.network.classify(batch.images)
        return self.over.cross_entropy(logits.float(), batch.targets), logits

    def end_task(self, task: Task) -> None:
        if not task.index:
            self.keep_means(task)

    def keep_means(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """Keep the mean feature of each class of the task; (features, targets) of its images: (n, d), (n,)."""
        features, targets = self.features_and_targets(task)
        for label, of_class in by_class(features, targets):
            self.means[label] = torch.from_numpy(of_class.mean(0))
        return features, targets

    def translated(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """The features of the task's images, then those that stand for each other class: (rows, d), (rows,)."""
        features, targets = self.keep_means(task)
        means = self.means.cpu().numpy()
        new = np.unique(targets)
        unit = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        rows = [features]
        labels = [targets]
        for old in np.setdiff1d(np.arange(task.num_seen), new):
            nearest = new[np.argmax(unit[new] @ unit[old])]
            rows.append(features[targets == nearest] - means[nearest] + means[old])
            labels.append(np.full(len(rows[-1]), old))
        return np.concatenate(rows), np.concatenate(labels)
