"""The base of the methods whose classifier is computed from features instead of trained."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import widest_float
from pycil_wsc.keys import key
from pycil_wsc.networks.closed_form_nets import ClosedFormNet, Lent
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments, BaseLearner
from pycil_wsc.training.phase import Phase

AT_ONCE = 10_000  # images that have features at the same time, at least


class ClosedForm(BaseLearner):
    """A method without training steps, except in the first task, in which the backbone may learn.

    From then on the backbone stays as it is. A task adds its features to sums, from which the classifier is computed:
    it is that of all images at once, in whatever order the tasks came. No memory is needed. A method gives
    :meth:`new_head`.

    Args:
        arguments: those of every learner.
        lent: the backbone of another learner, whose state is loaded into this one; None: it makes its own.
    """

    @dataclass(frozen=True)
    class Options:
        adapt: bool | None = key(
            None, "train the backbone on the first task, for `init_epoch` epochs; null: if it is not `pretrained`"
        )

    class Plan(BaseLearner.Plan):
        uses_memory = False
        one_phase = False
        grows_at_once = True
        epoch_keys = ()

        def planned_epochs(self, task: Task) -> int:
            return self.config.init_epoch if not task.index and self.adapts() else 0

        def adapts(self) -> bool:
            """Whether the first task trains the backbone."""
            adapt = self.config.options.adapt
            return not self.config.pretrained if adapt is None else adapt

    network: ClosedFormNet
    plan: Plan
    takes_out = True  # whether an image that was learned can be taken out of the sums again

    def __init__(self, *arguments: Unpack[Arguments], lent: Backbone | None = None) -> None:
        vars(self)["lent"] = lent  # the first attribute: a module's own cannot be set yet
        super().__init__(*arguments)

    def new_head(self, width: int, dtype: torch.dtype) -> nn.Module:
        """The classifier of features (B, ``width``); ``dtype``: of its sums."""
        raise NotImplementedError(f"{type(self).__name__} has no new_head")

    @property
    def part(self) -> int:
        """The number of images whose features are added at once."""
        return 2000

    @property
    def repeats(self) -> int:
        """How often each image is added."""
        return 1

    def images_of(self, task: Task) -> np.ndarray:
        """The task's training images in the order in which they are added: class by class, (n,)."""
        targets = self.manager.train_targets[task.train_indices]
        return task.train_indices[np.argsort(targets, kind="stable")]

    def build(self) -> ClosedFormNet:
        lent: Backbone | None = vars(self).pop("lent", None)
        dtype = widest_float(self.device)
        if lent is None:
            backbone = self.tuned_backbone()
            return ClosedFormNet(backbone, self.new_head(backbone.out_dim, dtype))
        with torch.device("meta"):  # a state is loaded, so that random features need not be drawn
            head = self.new_head(lent.out_dim, dtype)
        return ClosedFormNet(Lent(lent), head.to_empty(device="cpu"))

    def tuned_backbone(self) -> Backbone:
        """The backbone, with what the first task trains of it."""
        return self.new_backbone()

    def first_head(self, width: int, classes: int) -> nn.Module:
        """The layer with which the first task trains the backbone."""
        return nn.Linear(width, classes, bias=False)

    def grow(self, task: Task) -> None:
        super().grow(task)
        if not task.index and self.plan.adapts():
            with seeding.seeded(self.config.seed, "weights", task.index):
                self.network.first_head = self.first_head(self.network.backbone.out_dim, task.num_seen)

    def phases(self, task: Task) -> Iterator[Phase]:
        if not task.index and self.plan.adapts():
            yield self.main_phase(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.network.first_head is not None
        logits = self.network.first_head(self.network.backbone(batch.images))
        return self.over.cross_entropy(logits.float(), batch.targets), logits

    def end_task(self, task: Task) -> None:
        self.network.first_head = None
        indices, head = self.images_of(task), self.network.head
        known, former = self.relearned(indices)
        with torch.no_grad():
            if len(known):
                images, rows = np.unique(known, return_inverse=True)
                features = torch.from_numpy(self.outputs.features(indices[images]))
                labels = torch.from_numpy(self.manager.train_targets[indices[images]])
                self.correct(features, labels, rows, former)
            for features, labels in self.in_parts(np.delete(indices, known)):
                head.add(features.to(self.device), labels.to(self.device))
            head.solve()

    def in_parts(self, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (n, d) and classes (n,) of the images ``indices``, ``part`` at a time.

        The network sees them in the batches of all at once, but no more than some ten thousand have features.
        """
        labels = torch.from_numpy(self.manager.train_targets[indices])
        batch_size = self.config.batch_size
        at_once = batch_size * math.ceil(max(AT_ONCE, self.part) / batch_size)
        left = torch.empty(0)
        first = 0  # of the rows that are left
        for start in range(0, len(indices), at_once):
            features = torch.from_numpy(self.outputs.features(indices[start : start + at_once]))
            left = torch.cat([left, features]) if len(left) else features
            is_last = start + at_once >= len(indices)
            while len(left) >= self.part or (is_last and len(left)):
                yield left[: self.part], labels[first : first + self.part]
                left = left[self.part :]
                first += self.part

    def relearned(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of ``indices`` (n,) that earlier tasks have learned, and the class of each then: two of (k,)."""
        pairs = self.manager.relearned
        if not self.takes_out or not len(pairs):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = np.argsort(indices, kind="stable")
        starts, stops = (np.searchsorted(indices[order], pairs[:, 0], side=side) for side in ("left", "right"))
        rows = [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return np.concatenate(rows), np.repeat(pairs[:, 1], stops - starts)

    def correct(self, features: Tensor, labels: Tensor, rows: np.ndarray, former: np.ndarray) -> None:
        """Move ``rows`` (k,) from their ``former`` classes (k,) to their ``labels``; each counts once afterwards."""
        _, first = np.unique(rows, return_index=True)
        others = np.setdiff1d(np.arange(len(rows)), first)
        head, device = self.network.head, self.device
        places, classes = torch.from_numpy(rows), torch.from_numpy(former)
        if len(others):
            head.remove(features[places[others]].to(device), classes[others].to(device))
        moved = places[first]
        head.relabel(features[moved].to(device), classes[first].to(device), labels[moved].to(device))

    def classify(self, features: Tensor) -> Tensor:
        """In fp32, whatever the precision: large logits whose differences count."""
        with self.precision.full(features.device):
            return self.network.classify(features)
