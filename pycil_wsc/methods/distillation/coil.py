from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize
from torch.utils._python_dispatch import _disable_current_modes

from pycil_wsc.data.memory.exemplar_selection import normalise
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.methods.losses import distillation
from pycil_wsc.methods.transport import transport
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import PhaseRun


@register_learner(
    "coil",
    convnet_type="cosine_resnet32",
    init_epoch=160,
    init_milestones=[80, 120],
    epochs=160,
    milestones=[80, 120],
    weight_decay=5e-4,
)
class COIL(DistillingLearner):
    """COIL (Zhou et al., ACM MM 2021): rows of the head are transported between old and new classes.

    Optimal transport between class means maps the rows of old classes to initial rows of new ones, whose predictions
    are distilled in the first epoch. In later epochs it maps the rows of new classes to rows of old ones, whose
    predictions are trained to match the teacher's.
    """

    @dataclass(frozen=True)
    class Options:
        sinkhorn: float = key(0.464, "entropic regularisation of the transport", above=0, decides="later tasks")
        norm_term: float = key(3.0, "p of the p-norm that is the distance of two classes", low=1, decides="later tasks")
        init_term: float = key(1e-3, "first epoch: weight of new rows' distillation", low=0, decides="later tasks")
        reg_term: float = key(
            1e-3, "later epochs: weight of old rows' distillation, reached at the end", low=0, decides="later tasks"
        )
        transport_steps: int = key(30, "steps between renewals of old rows", low=1, decides="later tasks")
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")
        marginals: str = key(
            "pycil",
            "old rows: mass of a class in the transport: 1 / old classes on both sides (`pycil`), or `uniform` on each",
            choices=("pycil", "uniform"),
            decides="later tasks",
        )
        class_means: str = key(
            "images",
            "mean features of old classes for new rows: of all images of earlier tasks, as in PyCIL, or of `exemplars`",
            choices=("images", "exemplars"),
            decides="later tasks",
        )

    class Plan(DistillingLearner.Plan):
        needs_exemplars = True
        needs_new_classes = True

    new_rows: Tensor  # (new classes, d), from the old ones; and conversely:
    old_rows: Tensor  # (old classes, d)
    terms: Tensor  # (2,) the weights of their distillation in this epoch; on the device, for a loss that is compiled
    epoch = step = 0
    due = False  # whether the next step renews the old rows

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), CosineHead)

    def grow(self, task: Task) -> None:
        super().grow(task)
        width = self.network.head.in_features
        for name, shape in (("new_rows", (task.num_new, width)), ("old_rows", (task.num_old, width)), ("terms", 2)):
            self.register_buffer(name, torch.zeros(shape))
        self.new = task.train_indices[self.manager.train_targets[task.train_indices] >= task.num_old]

    @torch.no_grad()
    def begin_task(self, task: Task) -> None:
        self.epoch = 0
        self.step = 0
        self.due = False
        if not task.index:
            return
        weight = self.network.head.weight
        rows = self.transported(self.images_before(task), self.new)
        if not rows.any():
            raise UserError("sinkhorn: the transport plan underflows to 0 at this value; use a larger one")
        scale = weight[: task.num_old].norm(dim=1).mean() / rows.norm(dim=1).mean()
        self.new_rows.copy_(scale * rows)
        weight[task.num_old :] = self.new_rows
        self.terms.copy_(torch.tensor([self.config.options.init_term, 0.0]))

    def images_before(self, task: Task) -> np.ndarray:
        if self.config.options.class_means == "exemplars":
            return self.memory.indices
        indices = np.concatenate([earlier.train_indices for earlier in self.manager.tasks[: task.index]])
        if len(indices) < self.memory.seen:
            raise UserError("class_means: 'images' needs all images of earlier tasks; set it to 'exemplars'")
        return indices

    def transported(self, samples: np.ndarray, others: np.ndarray, total: int | None = None) -> Tensor:
        """The head's rows of the classes of ``samples``, as rows of the m classes of ``others``: (m, d)."""
        options = self.config.options
        targets = self.manager.train_targets
        sources = means_of(self.outputs.features(samples), targets[samples])
        goals = means_of(self.outputs.features(others), targets[others])
        labels, plan = plan_between(sources, goals, options.norm_term, options.sinkhorn, total)
        weight = self.network.head.weight[torch.from_numpy(labels).to(self.device)]
        return torch.from_numpy(plan.T).to(weight) @ normalize(weight)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        soft = self.teach(batch.images)
        features = self.network.extract(batch.images)
        logits = self.network.classify(features).float()
        loss = self.over.cross_entropy(logits, batch.targets)
        if soft is None:
            return loss, logits
        if not torch.compiler.is_compiling() and self.due:
            with _disable_current_modes():  # the step's arithmetic is counted without it
                self.renew()  # with batch norm's statistics of this batch, as in PyCIL
        T = self.config.options.T
        share = self.num_old / self.num_seen
        directions = normalize(features.float())
        from_old = linear(directions, normalize(self.new_rows))
        from_new = linear(directions, normalize(self.old_rows))
        loss = (1 - share) * loss + share * distillation(logits[:, : self.num_old], soft, T)
        loss = loss + self.terms[0] * distillation(logits[:, self.num_old :], from_old, T)
        return loss + self.terms[1] * distillation(from_new, soft, T), logits

    def after_step(self) -> None:
        self.step += 1
        self.due = min(self.num_old, self.epoch) > 0 and self.step % self.config.options.transport_steps == 0
        if self.due and self.config.compile:
            self.renew()

    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None:
        self.epoch = epoch + 1
        self.step = 0
        self.due = task.index > 0
        if self.due:
            progress = (epoch + 1) / run.epochs
            self.terms.copy_(torch.tensor([0.0, self.config.options.reg_term * progress**2]))

    @torch.no_grad()
    def renew(self) -> None:
        """Renew the rows of old classes, unless one has no exemplars. Synchronises with the device."""
        training = self.network.training
        self.due = False
        if all(len(self.memory.classes.get(label, ())) for label in range(self.num_old)):
            total = self.num_old if self.config.options.marginals == "pycil" else None
            self.old_rows.copy_(self.transported(self.new, self.memory.indices, total))
            self.network.train(training)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"epoch": self.epoch}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.epoch, self.due = state["epoch"], state["epoch"] > 0


def means_of(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The k classes of some samples, and the normalised mean of their normalised features: (k,), float64 (k, d).

    ``features``: (n, d); ``targets``: (n,).
    """
    features, labels = normalise(features), np.unique(targets)
    means = np.stack([features[targets == label].mean(0) for label in labels]).astype(float)
    return labels, means / np.linalg.norm(means, axis=1, keepdims=True)


def plan_between(
    sources: tuple[np.ndarray, np.ndarray],
    goals: tuple[np.ndarray, np.ndarray],
    norm: float,
    regularisation: float,
    total: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The classes of the sources, and the plan between these and the goals, which are as :func:`means_of` gives them.

    ``norm``: the power of the distance; ``total``: each class has a share of 1 / total; None: of 1 / the number of
    classes on its side.
    """
    (labels, means), (_, others) = sources, goals
    costs = (np.abs(means[:, None] - others) ** norm).sum(2) ** (1 / norm)
    rows, columns = (np.full(len(side), 1 / (total or len(side))) for side in (means, others))
    return labels, transport(costs, rows, columns, regularisation)
