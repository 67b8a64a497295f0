import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.class_rows_learner import ClassRows, by_class
from pycil_wsc.methods.transport import transport
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments, BaseLearner
from pycil_wsc.training.learner_state import placed
from pycil_wsc.training.optimizers.schedules import Schedule
from pycil_wsc.training.phase import Phase, PhaseRun

SLOW_EPOCHS, SLOW = 5, 1 / 3  # the rate at first: torch's ConstantLR with its defaults, as in PILOT


@register_learner(
    "duct",
    backbone_lr_factor=0.01,
    init_epoch=10,
    init_lr=0.1,
    init_milestones=[],
    init_weight_decay=5e-4,
    epochs=10,
    lrate=0.1,
    milestones=[],
    weight_decay=5e-4,
    nme=False,
)
class DUCT(ClassRows):
    """Dual consolidation (Zhou et al., CVPR 2025, https://arxiv.org/abs/2410.00911), as PILOT has it for new classes.

    Each task trains the initial backbone anew. The changes of all tasks are added to it, each weighted by how similar
    the classes' means in the features before and after the training are. Then the head alone is trained on the merged
    backbone, and rows of old classes move towards those of new ones, by optimal transport between class means in the
    initial features.
    """

    @dataclass(frozen=True)
    class Options:
        merge_scalar: float = key(0.25, "factor of each task's change of the backbone", low=0)
        head_merge_ratio: float = key(
            0.25, "share of the transported rows in the rows of old classes", low=0, high=1, decides="later tasks"
        )
        epc_re: int = key(5, "epochs of the head on the merged backbone", low=1)
        lr_re: float | None = key(
            None, "learning rate of these; null: `lrate`, as in PILOT, whose own `lr_re` has no effect", low=0
        )
        ot_reg: float = key(0.02, "entropic regularisation of the transport", above=0, decides="later tasks")

    class Plan(BaseLearner.Plan):
        uses_memory = False
        one_phase = False
        needs_new_classes = True
        epoch_keys = ("epochs", "epc_re")
        own_schedules = ("epc_re",)

        def new_samples(self, task: Task, targets: np.ndarray) -> np.ndarray:
            """Those of new classes."""
            return task.train_indices[targets[task.train_indices] >= task.num_old]

        def planned_epochs(self, task: Task) -> int:
            values = vars(self.config) | vars(self.config.options)
            return (values["epochs"] if task.index else values["init_epoch"]) + values["epc_re"]

    network: IncrementalNet
    means: Tensor  # of the initial features of each class: (classes, d)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.register_rows("means", self.network.backbone.out_dim)
        self.initial = copy.deepcopy(self.network.backbone).requires_grad_(False)
        self.change: dict[str, Tensor] = {}  # of the backbone, summed over the tasks

    def build(self) -> IncrementalNet:
        return IncrementalNet(self.new_backbone(), CosineHead)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.num_old = task.num_old

    def begin_task(self, task: Task) -> None:
        self.network.backbone.load_state_dict(self.initial.state_dict())
        for label, mean in self.new_means(task):
            self.means[label] = mean

    def phases(self, task: Task) -> Iterator[Phase]:
        main = self.main_phase(task)
        yield replace(main, lr=slow_at_first(main.lr))
        yield self.retraining(task)

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        merge = self.merge_head if run.number else self.merge_backbone
        merge(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.images)
        return self.over.cross_entropy(logits[:, self.num_old :].float(), batch.targets - self.num_old), logits

    def retraining_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """:meth:`loss`, through which the backbone gets no gradients."""
        with torch.no_grad():
            features = self.network.extract(batch.images)
        logits = self.network.classify(features)
        return self.over.cross_entropy(logits[:, self.num_old :].float(), batch.targets - self.num_old), logits

    def new_means(self, task: Task) -> Iterator[tuple[int, Tensor]]:
        """The mean feature of each new class: (d,)."""
        indices = self.plan.new_samples(task, self.manager.train_targets)
        features, targets = self.outputs.features(indices), self.manager.train_targets[indices]
        for label, rows in by_class(features, targets):
            yield label, torch.from_numpy(rows.mean(0)).to(self.device)

    @torch.no_grad()
    def merge_backbone(self, task: Task) -> None:
        """Add the task's change of the backbone, weighted, to those before, and their sum to the initial backbone."""
        similarities = [cosine_similarity(self.means[label], mean, dim=0) for label, mean in self.new_means(task)]
        factor = self.config.options.merge_scalar * torch.stack(similarities).mean()
        initial = self.initial.state_dict()
        for name, parameter in self.network.backbone.named_parameters():
            before = self.change.get(name, torch.zeros_like(parameter))
            self.change[name] = before + factor * (parameter - initial[name])
            parameter.copy_(initial[name] + self.change[name])
        self.outputs.recompute_batch_norm(task)

    def retraining(self, task: Task) -> Phase:
        """The phase that trains the head on the merged backbone."""
        options = self.config.options
        usual = self.config.lrate if task.index else self.config.init_lr
        rate = usual if options.lr_re is None else options.lr_re
        phase = self.main_phase(task, self.network.head.parameters(), options.epc_re)
        head = self.network.head
        return replace(
            phase, name="retraining", lr=slow_at_first(lambda epoch: rate), network=head, loss=self.retraining_loss
        )

    @torch.no_grad()
    def merge_head(self, task: Task) -> None:
        """Move the rows of each earlier task's classes towards the new rows, as they are transported to them."""
        options = self.config.options
        rows, bounds = self.network.head.weight, self.manager.boundaries
        means = self.means.cpu().double()
        new = slice(task.num_old, task.num_seen)
        for start, stop in zip(bounds[: task.index], bounds[1 : task.index + 1], strict=True):
            costs = torch.cdist(means[new], means[start:stop]).numpy()
            of_new, of_old = (np.full(side, 1 / side) for side in costs.shape)
            plan = torch.from_numpy(transport(costs, of_new, of_old, options.ot_reg))  # (new, old)
            moved = (plan.T @ rows[new].cpu().double()).to(rows)
            rows[start:stop] += options.head_merge_ratio * (moved - rows[start:stop])

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"change": self.change}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.change = placed(state["change"], self.device)


def slow_at_first(schedule: Schedule) -> Schedule:
    """``schedule``, but a third of it in the first five epochs."""
    return lambda epoch: schedule(epoch) * (SLOW if epoch < SLOW_EPOCHS else 1)
