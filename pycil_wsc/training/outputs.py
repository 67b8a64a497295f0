"""Outputs of a learner's network over many images: features, logits, batch-norm statistics; and predicted classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc import seeding
from pycil_wsc.consolidation import recompute_batch_norm
from pycil_wsc.data.batches.epoch_order import CHUNK, num_batches
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.batches import Batches, Sampling
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.plan import Plan
from pycil_wsc.training.precision import Precision
from pycil_wsc.training.processes import Processes


class Extracting(Protocol):
    """What the outputs need of a learner."""

    manager: TaskSequence
    processes: Processes
    device: torch.device
    batches: Batches
    plan: Plan

    @property
    def config(self) -> LearnerConfig: ...
    @property
    def network(self) -> nn.Module: ...
    @property
    def precision(self) -> Precision: ...
    def extract(self, images: Tensor) -> Tensor: ...
    def classify(self, features: Tensor) -> Tensor: ...
    def eval(self) -> object: ...


class Outputs:
    """The outputs of a learner's network for samples of a data set: ``self.outputs``.

    Images have the test transform, and the network is in evaluation mode. With several processes, each computes its
    share of the batches.
    """

    def __init__(self, learner: Extracting) -> None:
        self.learner = learner
        self.num_known = 0  # classes seen
        self.wanted = np.empty(0, np.int64)  # samples whose features are noted when they are computed anyway
        self.noted: dict[int, np.ndarray] = {}  # sample -> features (d,), as computed last

    @property
    def batch_size(self) -> int:
        """Images in a batch: as in training, but the small batches of a stream are no measure for tests."""
        config = self.learner.config
        return max(config.batch_size, CHUNK) if config.online else config.batch_size

    def known(self, logits: Tensor) -> Tensor:
        """Those of ``logits`` (B, any) that are of the classes seen: (B, classes)."""
        return logits[:, : self.num_known] if self.learner.config.whole_head else logits

    def features(self, indices: np.ndarray) -> np.ndarray:
        """Features of training samples: float32 numpy (n, d)."""
        parts = [features for features, _ in self._of_training(indices)]
        features = self.gathered(parts, len(indices)).numpy()
        rows = np.flatnonzero(np.isin(indices, self.wanted))
        self.noted.update(zip(indices[rows].tolist(), features[rows].copy(), strict=True))
        return features

    def logits(self, indices: np.ndarray) -> Tensor:
        """Logits of training samples: float32 (n, classes), on the CPU."""
        learner = self.learner
        parts = []
        for features, _ in self._of_training(indices):
            with torch.inference_mode(), learner.precision.autocast():
                parts.append(learner.classify(features).float())
        return self.gathered(parts, len(indices))

    def _of_training(self, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        return self.in_batches(self.learner.batches.source, indices, self.learner.manager.train_targets)

    @torch.inference_mode()
    def in_batches(self, source: Source, indices: np.ndarray, targets: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and targets of the samples ``indices`` of ``source``: float32 (B, d) and int64 (B,) for each of
        this process's batches; :meth:`gathered` combines what is computed from them.
        """
        learner = self.learner
        learner.eval()
        share = learner.processes.share_of_batches
        for images, labels in source.batches(indices, targets, self.batch_size, share=share):
            with learner.precision.autocast():
                features = learner.extract(images)
            yield features.float(), labels

    def gathered(self, parts: list[Tensor], rows: int) -> Tensor:
        """The outputs for all ``rows`` images, from the ``parts`` of all processes: (rows, ...), on the CPU."""
        processes = self.learner.processes
        if processes.count > 1:
            batches = num_batches(rows, self.batch_size)
            parts = processes.gather([part.cpu() for part in parts], batches)
        return torch.cat(parts).cpu()

    def recompute_batch_norm(self, task: Task) -> None:
        """Compute the network's batch-norm statistics anew, in one pass over the task's training data: for weights that
        are an average.
        """
        learner = self.learner
        address = ("dropout", task.index, "batch norm", learner.processes.rank)
        seeded = seeding.seeded(learner.config.seed, *address, device=learner.device)
        with learner.precision.autocast(), synced_batch_norm(learner.processes), seeded:
            samples = Sampling(indices=learner.batches.indices(task), mixed=learner.plan.mixes)
            batches = learner.batches.of(samples, task.index, "batch norm")
            recompute_batch_norm(learner.network, (batch.images for batch in batches))


TOP_K = 5


def best_classes(scores: Tensor, largest: bool = True) -> Tensor:
    """The ``min(TOP_K, classes)`` best classes of each row, best first: (B, classes) -> int64 (B, <=5).

    All predictions are made here, in runs and from saved weights: by logits or, with ``largest=False``, by distances to
    class means. Ties, which are frequent in bf16, are therefore always broken in the same way: as ``torch.topk`` does
    on float32 columns in learning order. Its order of ties depends on k, so k is always the same.
    """
    return scores.float().topk(min(TOP_K, scores.shape[1]), largest=largest).indices


def nearest_means(features: Tensor, means: Tensor) -> Tensor:
    """The classes whose ``means`` (C, d) are nearest to the normalised ``features`` (B, d): int64 (B, <=5)."""
    unit = features / (features.norm(dim=1, keepdim=True) + 1e-8)
    return best_classes(torch.cdist(unit, means), largest=False)
