"""The base class of learners that keep the mean feature of each class, and no images."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from pycil_wsc.data.memory.exemplar_selection import normalise
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.prototypes.class_rows_learner import ClassRows, by_class
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import Phase

PYCIL = {  # the constants of PyCIL's PASS, IL2A and SSRE, of all tasks
    "optimizer": "adam",
    **dict.fromkeys(("init_epoch", "epochs"), 101),
    **dict.fromkeys(("init_milestones", "milestones"), [45, 90]),
    **dict.fromkeys(("init_lr", "lrate"), 0.001),
}

MARK = "passes_twice"  # an attribute of batch norms that do


class PrototypeLearner(ClassRows, DistillingLearner):
    """Distils the features of the network before the task, and trains the head on prototypes of the old classes.

    ``prototypes``: the mean feature of each class after the task that learned it: (classes, d).
    """

    @dataclass(frozen=True)
    class Options:
        temp: float = key(0.1, "temperature of the cross-entropies", above=0)
        lambda_fkd: float = key(10.0, "weight of the distillation of features", low=0, decides="later tasks")
        lambda_proto: float = key(10.0, "weight of the loss of the prototypes", low=0, decides="later tasks")

    class Plan(DistillingLearner.Plan):
        uses_memory = False

    two_passes = False  # whether PyCIL computes features twice in each step of a later task
    prototypes: Tensor

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.register_rows("prototypes", self.network.backbone.out_dim)

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index and self.two_passes:
            pass_twice(self.network)

    def phases(self, task: Task) -> Iterator[Phase]:
        phase = self.main_phase(task)
        yield replace(phase, draw=self.draw) if task.index else phase

    def draw(self, generator: torch.Generator, times: int = 1) -> tuple[Tensor, ...]:
        """Random old classes, whose prototypes are a part of each batch's loss: int64 (times * ``batch_size``,)."""
        shape = (times * self.config.batch_size,)
        return (torch.randint(self.num_old, shape, generator=generator, device=self.device),)

    def old_features(self, images: Tensor) -> Tensor | None:
        """The features (B, d) of the network before the task, or None in the first task."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            return self.teacher.extract(images)

    def end_task(self, task: Task) -> None:
        for label, features in by_class(*self.features_and_targets(task)):
            self.keep(label, features)

    def keep(self, label: int, features: np.ndarray) -> None:
        """Keep what stands for a class from the features (n, d) of its training images."""
        self.prototypes[label] = torch.from_numpy(features.mean(0))

    def class_means(self, num_seen: int) -> np.ndarray | None:
        """The prototypes, scaled to unit length: as in PyCIL, they take the place of the means of exemplars."""
        return normalise(self.prototypes[:num_seen].cpu().numpy())

    def scaled_cross_entropy(
        self, logits: Tensor, targets: Tensor, classes: Tensor | None = None, weighted: bool = True
    ) -> Tensor:
        """The cross-entropy at the configured temperature; arguments as of :meth:`.over.Over.cross_entropy`."""
        return self.over.cross_entropy(logits.float() / self.config.options.temp, targets, classes, weighted)


def pass_twice(network: nn.Module) -> None:
    """Let batch norm's statistics move as far in one pass as in two."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None and not hasattr(module, MARK):
            setattr(module, MARK, True)
            module.momentum = 1 - (1 - module.momentum) ** 2
