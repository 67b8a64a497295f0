from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pycil_wsc.data.batches.gaussians import GaussianSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.class_rows_learner import ClassRows, by_class
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments, BaseLearner
from pycil_wsc.training.learner_state import placed
from pycil_wsc.training.optimizers.schedules import cosine_lr
from pycil_wsc.training.phase import Phase, PhaseRun

PER_CLASS = 256  # features drawn of each class in an epoch, and the size of a batch; as in the authors' code
NEAREST, FARTHEST = 1.0, 0.9  # factor of a class's mean: after the newest task, and after the oldest of many
JITTER = 1e-4  # added to the variances
AS_PILOT = {  # keys of PILOT's file
    "backbone_lr_factor": 0.01,
    "batch_size": 64,
    "init_epoch": 20,
    "init_lr": 0.01,
    "init_milestones": [18],
    "init_weight_decay": 5e-4,
    "epochs": 20,
    "lrate": 0.01,
    "milestones": [18],
    "weight_decay": 5e-4,
    "nme": False,
}


class HeadPerTask(nn.Module):
    """A linear layer for each task, whose logits are concatenated. Old ones are frozen until they are aligned."""

    def __init__(self, in_features: int):
        super().__init__()
        self.in_features = in_features
        self.parts = nn.ModuleList()

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The classes of each task."""
        return [len(part.weight) for part in self.parts]  # pyright: ignore[reportArgumentType]

    def grow(self, num_classes: int) -> None:
        self.parts.requires_grad_(False)
        new = nn.Linear(self.in_features, num_classes - self.out_features)
        nn.init.trunc_normal_(new.weight, std=0.02)
        nn.init.zeros_(new.bias)
        self.parts.append(new)

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes)."""
        return torch.cat([part(features) for part in self.parts], 1)


@register_learner("slca", **AS_PILOT)
class SLCA(ClassRows):
    """SLCA (Zhang et al., ICCV 2023, https://arxiv.org/abs/2303.05118): the backbone learns slowly, at 1 % of the rate
    of the head, and the head is then aligned on features drawn from a normal distribution of each class.

    Without memory. The cross-entropy of a task is over its new classes alone. As in the authors' code the next task
    begins with the head as it was before the alignment.
    """

    @dataclass(frozen=True)
    class Options:
        ca_epochs: int = key(3, "epochs of the alignment; 0: none", low=0, decides="later tasks")
        ca_with_logit_norm: float = key(
            0.1,
            "temperature of logits that are divided by the mean of their norms over the tasks; 0: logits as they are",
            low=0,
            decides="later tasks",
        )
        keep_alignment: bool = key(
            False, "begin the next task with the aligned head, instead of the one before", decides="later tasks"
        )

    class Plan(BaseLearner.Plan):
        uses_memory = False
        one_phase = False
        needs_new_classes = True
        epoch_keys = ("epochs", "ca_epochs")
        own_schedules = ("ca_epochs",)
        over_features = ("ca_epochs",)

        def new_samples(self, task: Task, targets: np.ndarray) -> np.ndarray:
            """Those of new classes."""
            return task.train_indices[targets[task.train_indices] >= task.num_old]

    network: IncrementalNet
    means: Tensor  # of the features of each class: (classes, d)
    factors: Tensor  # L with L Lᵀ their covariance: (classes, d, d)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        width = self.network.backbone.out_dim
        self.register_rows("means", width)
        self.register_rows("factors", width, width)
        self.unaligned: dict[str, Tensor] = {}  # the head before the alignment, until the next task begins

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), HeadPerTask)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.num_old = task.num_old

    def begin_task(self, task: Task) -> None:
        if not self.config.options.keep_alignment:
            self.network.head.load_state_dict(self.unaligned, strict=False)
        self.unaligned = {}

    def phases(self, task: Task) -> Iterator[Phase]:
        yield self.main_phase(task)
        if task.index and self.config.options.ca_epochs:
            yield self.alignment(task)

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        if not run.number:
            self._before_alignment(task)
            self.keep_statistics(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits[:, self.num_old :].float(), batch.targets - self.num_old), logits

    def _before_alignment(self, task: Task) -> None:
        """Called between the training and the alignment."""
        self.unaligned = {name: value.clone() for name, value in self.network.head.state_dict().items()}

    def keep_statistics(self, task: Task) -> None:
        """Keep mean and covariance of the features of each new class."""
        indices = self.plan.new_samples(task, self.manager.train_targets)
        features, targets = self.outputs.features(indices), self.manager.train_targets[indices]
        for label, rows in by_class(features, targets):
            covariance = JITTER * np.eye(rows.shape[1])
            if len(rows) > 1:
                covariance += np.cov(rows.T.astype(np.float64))
            self.means[label] = torch.from_numpy(rows.mean(0))
            self.factors[label] = torch.linalg.cholesky(torch.from_numpy(covariance).float())

    def alignment(self, task: Task) -> Phase:
        """The phase that trains the whole head on features that are drawn."""
        epochs = self.config.options.ca_epochs
        head = self.network.head.requires_grad_(True)
        labels = torch.arange(task.num_seen)
        targets = np.repeat(labels.numpy(), PER_CLASS)
        return replace(
            self.main_phase(task, head.parameters(), epochs),
            name="alignment",
            lr=cosine_lr(self.config.lrate, epochs),
            indices=np.arange(len(targets)),
            targets=targets,
            source=GaussianSource(self.scaled_means(task), self.factors, labels, PER_CLASS, self.device),
            batch_size=PER_CLASS,
            images=len(self.batches.indices(task)),
            network=head,
            loss=self.alignment_loss,
        )

    def scaled_means(self, task: Task) -> Tensor:
        """The means, of which older ones are nearer to 0: (classes, d)."""
        age = np.repeat(np.arange(1, task.index + 2), self.network.head.sizes) / (task.index + 1)
        scale = torch.from_numpy(FARTHEST + (NEAREST - FARTHEST) * age).float()
        return self.means * scale.to(self.device)[:, None]

    def alignment_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of features."""
        logits = self.network.classify(batch.images).float()
        temperature = self.config.options.ca_with_logit_norm
        if not temperature:
            return cross_entropy(logits, batch.targets), logits
        parts = logits.split(self.network.head.sizes, 1)
        norms = torch.stack([part.norm(dim=1) + 1e-7 for part in parts], 1)
        scaled = logits / norms.mean(1, keepdim=True) / temperature
        return cross_entropy(scaled, batch.targets), logits

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"unaligned": self.unaligned}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.unaligned = placed(state["unaligned"], self.device)
