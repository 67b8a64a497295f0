import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_embedding_loss, linear, normalize

from pycil_wsc import seeding
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.networks.heads import uniform_rows
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch, Sampling
from pycil_wsc.training.phase import Phase, PhaseRun


class PrototypeHead(nn.Module):
    """A cosine classifier: prototypes of the old classes, which are frozen, of the newest, and of classes to come.

    The last are random and frozen; there are none unless the head is made for all classes of a run. New ones are
    uniform in +-1 / sqrt(in_features).
    """

    made_anew = ("weight",)  # what each task makes anew

    def __init__(self, in_features: int):
        super().__init__()
        self.old = nn.Parameter(torch.empty(0, in_features), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(0, in_features))  # of the newest classes
        self.coming = nn.Parameter(torch.empty(0, in_features), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return len(self.old) + len(self.weight) + len(self.coming)

    @torch.no_grad()
    def grow(self, num_classes: int) -> None:
        """Grow to ``num_classes`` prototypes, if there are fewer; those that are added belong to classes to come."""
        more = uniform_rows(max(0, num_classes - self.out_features), self.in_features).to(self.coming)
        self.coming = nn.Parameter(torch.cat([self.coming, more]), requires_grad=False)

    @torch.no_grad()
    def begin(self, number: int) -> None:
        """Give the next ``number`` classes new prototypes, and freeze those of the last ones."""
        if not number:
            return  # the newest classes are still trained
        new = uniform_rows(number, self.in_features).to(self.weight)
        self.old = nn.Parameter(torch.cat([self.old, self.weight]), requires_grad=False)
        self.weight = nn.Parameter(new)
        self.coming = nn.Parameter(self.coming[number:].clone(), requires_grad=False)

    def cosines(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, classes)."""
        return linear(normalize(features), normalize(torch.cat([self.old, self.weight, self.coming])))

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, classes) logits."""
        return self.scale * self.cosines(features)


@register_learner(
    "lucir",
    init_epoch=160,
    init_milestones=[80, 120],
    epochs=160,
    milestones=[80, 120],
    weight_decay=5e-4,
    exemplars="herding_raw",
    head="all",
)
class LUCIR(DistillingLearner):
    """Learning a unified classifier incrementally by rebalancing (Hou et al., CVPR 2019) as Mammoth has it.

    A cosine classifier whose new prototypes are imprinted, cosine distillation of the features, and a ranking loss that
    keeps images of old classes away from the ``k_mr`` nearest new prototypes. A second phase trains the newest
    prototypes on the exemplars alone.

    Mammoth and the paper differ: there the distillation in task t, counted from 0, weighs ``lamda_base`` x sqrt(t - 1),
    which is 0 in the second task, here too by ``lamda_rule``; prototypes of classes to come compete (``head``); and the
    second phase lowers its rate after 10 batches, not epochs (``ft_decay_steps``). The paper's networks have no ReLU
    before the classifier, as ``cosine_resnet32``.
    """

    network: IncrementalNet

    @dataclass(frozen=True)
    class Options:
        lamda_base: float = key(5.0, "weight of the features' distillation", low=0, decides="later tasks")
        lamda_rule: str = key(
            "mammoth",
            "factor of this weight in task t, counted from 0: sqrt(t - 1) (`mammoth`), or the root of old classes / new"
            " classes (`paper`)",
            choices=("mammoth", "paper"),
            decides="later tasks",
        )
        lamda_mr: float = key(1.0, "weight of the ranking loss", low=0, decides="later tasks")
        k_mr: int = key(2, "new prototypes that the ranking loss compares", low=1, decides="later tasks")
        mr_margin: float = key(0.5, "margin of the ranking loss", low=0, decides="later tasks")
        imprint: bool = key(True, "begin new prototypes with the mean features of their classes", decides="later tasks")
        ft_epochs: int = key(20, "epochs of the second phase", low=1)
        ft_lrate: float = key(0.01, "initial learning rate of the second phase", low=0)
        ft_decay_steps: int | None = key(
            10, "steps after which the second phase divides its rate by 10; null: after 10 epochs", low=1
        )

    class Plan(DistillingLearner.Plan):
        one_phase = False
        needs_exemplars = True
        any_head = True
        epoch_keys = ("epochs", "ft_epochs")
        own_schedules = ("ft_epochs",)

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            chosen = copy.deepcopy(memory)
            chosen.update(task, targets, None, np.random.default_rng(0))
            epochs = self.config.epochs if task.index else self.config.init_epoch
            return epochs * (len(task.train_indices) + len(memory)) + self.config.options.ft_epochs * len(chosen)

    balanced: list[int] | None = None  # the exemplars after the task, while the second phase trains on them
    statistics: Sequence[Tensor] = ()  # those of batch norm, while they stay as they are

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), PrototypeHead)

    def grow(self, task: Task) -> None:
        self.number = task.index
        super().grow(task)
        self.network.head.begin(task.num_new)

    def begin_task(self, task: Task) -> None:
        self.balanced = None
        if task.index and task.num_new and self.config.options.imprint:
            self.imprint(task)

    @torch.no_grad()
    def imprint(self, task: Task) -> None:
        """Set the new prototypes to the means of their classes' augmented images, as long as the old ones on average.

        A mean is that of unit features, in evaluation mode, and scaled to unit length first.
        """
        head = self.network.head
        sums = torch.zeros(task.num_new, head.in_features, device=self.device)
        indices = task.train_indices[self.manager.train_targets[task.train_indices] >= task.num_old]
        self.network.eval()
        for batch in self.batches.of(Sampling(indices=indices, mixed=False), task.index, "imprint"):
            with self.precision.autocast():
                features = self.network.extract(batch.images)
            sums.index_add_(0, batch.targets - task.num_old, normalize(features.float()))
        means = normalize(self.processes.sum_(sums))
        head.weight.copy_(means * head.old.norm(dim=1).mean())

    def phases(self, task: Task) -> Iterator[Phase]:
        yield self.main_phase(task)
        options = self.config.options
        indices = np.array(self.balanced, np.int64)
        steps = options.ft_decay_steps or 10 * self.batches.number(len(indices))
        epochs = steps / self.batches.number(len(indices))
        head = self.network.head
        main = self.main_phase(task, [head.weight, head.scale], options.ft_epochs)
        yield replace(
            main,
            name="balanced",
            lr=lambda epoch: options.ft_lrate * (0.1 if epoch >= epochs - 1e-9 else 1.0),
            indices=indices,
            mixed=False,
            loss=self.balanced_loss,
        )

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        if not run.number:
            self.balanced = self._exemplars_after(task).tolist()

    def _exemplars_after(self, task: Task) -> np.ndarray:
        """Those that will be chosen after the task: the second phase leaves the features as they are."""
        rng = np.random.default_rng(seeding.derived_seed(self.config.seed, "exemplars", task.index))
        chosen = copy.deepcopy(self.memory)
        chosen.update(task, self.manager.train_targets, self.outputs.features, rng, self.processes.map)
        return chosen.indices

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        self.statistics = ()
        if run.number:
            run.by_step = True  # Mammoth's scheduler counts batches
            self.statistics = [buffer.clone() for buffer in self.network.buffers()]

    def after_step(self) -> None:
        """In the second phase, the statistics of batch norm stay as they are; it normalises by those of the batch."""
        for buffer, before in zip(self.network.buffers(), self.statistics):
            buffer.copy_(before)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.network.extract(batch.images)
        loss, logits = self.classification(features, batch)
        if self.teacher is not None:
            with torch.no_grad():
                before = self.teacher.extract(batch.images)
            same = torch.ones(len(features), device=features.device)
            loss = loss + self.lamda() * cosine_embedding_loss(features.float(), before.float(), same)
        return loss, logits

    def balanced_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            features = self.network.extract(batch.images)
        return self.classification(features, batch)

    def classification(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy and, from the second task on, the ranking loss: (scalar, logits)."""
        head = self.network.head
        cosines = head.cosines(features).float()
        logits = head.scale * cosines
        loss = self.over.cross_entropy(logits, batch.targets)
        novel = cosines[:, self.num_old :]
        if self.teacher is None or not novel.shape[1]:
            return loss, logits
        options = self.config.options
        nearest = novel.topk(min(options.k_mr, novel.shape[1]), 1).values
        right = cosines.gather(1, batch.targets[:, None])
        ranking = (nearest - right + options.mr_margin).relu().mean(1)
        return loss + options.lamda_mr * self.over.mean(ranking, batch.targets < self.num_old), logits

    def lamda(self) -> float:
        """The weight of the distillation."""
        options = self.config.options
        if options.lamda_rule == "paper":
            return options.lamda_base * math.sqrt(self.num_old / max(1, self.num_seen - self.num_old))
        return options.lamda_base * math.sqrt(self.number - 1)

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"balanced": self.balanced}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.balanced = state["balanced"]
