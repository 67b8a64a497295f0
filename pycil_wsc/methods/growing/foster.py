import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.losses import balanced_weights, distillation
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import ExpandingNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase, PhaseRun


@register_learner(
    "foster",
    scheduler="cosine",
    epochs=170,
    weight_decay=5e-4,
)
class FOSTER(BaseLearner):
    """FOSTER (Wang et al., 2022): a second backbone learns the residuals of the first; then both are compressed.

    ``network`` is the teacher with two backbones; it is tested, and its features choose exemplars. The student, trained
    by distillation, is tested too and becomes the first backbone of the next task.
    """

    network: ExpandingNet

    @dataclass(frozen=True)
    class Options:
        compression_epochs: int = key(130, "epochs of the second phase", low=1, decides="later tasks")
        compression_weight_decay: float = key(0.0, "weight decay of the second phase", low=0, decides="later tasks")
        beta1: float = key(
            0.96, "boosting: re-weighting of rare classes (Cui et al., 2019)", low=0, below=1, decides="later tasks"
        )
        beta2: float = key(0.97, "compression: re-weighting of rare classes", low=0, below=1, decides="later tasks")
        lambda_okd: float = key(1.0, "boosting: weight of the distillation", low=0, decides="later tasks")
        T: float = key(2.0, "temperature of the distillation", above=0, decides="later tasks")
        oofc: str = key(
            "ft",
            "the new classes' weights on old features: trained (`ft`), or kept at zero (`az`)",
            choices=("ft", "az"),
            decides="later tasks",
        )
        is_teacher_wa: bool = key(False, "align the head after boosting", decides="later tasks")
        is_student_wa: bool = key(False, "align the student's head after compression", decides="later tasks")
        wa_value: float = key(
            1.0,
            "factor of the new rows in the alignment, raised to the power old classes / new classes",
            above=0,
            decides="later tasks",
        )

    class Plan(BaseLearner.Plan):
        plain_first_task = True
        epoch_keys = ("epochs", "compression_epochs")
        one_phase = False
        expands = True  # for the duration of a task

    student: ExpandingNet | None  # these two: from the second task on
    old_head: IncrementalHead | None

    def build(self) -> nn.Module:
        return ExpandingNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        self.num_old, self.num_seen = task.num_old, task.num_seen
        if task.index > 1:
            assert self.student is not None
            self.network = self.student
        self.old_head = copy.deepcopy(self.network.head).requires_grad_(False) if task.index else None
        self.network.grow(task.num_seen, task.num_seen)
        self.network.blocks[:-1].requires_grad_(False)
        self.student = self._student(task, self.old_head) if self.old_head else None

    def _student(self, task: Task, old_head: IncrementalHead) -> ExpandingNet:
        """A network of one backbone, initialised from the teacher's old one, and a head with the old head's rows."""
        student = ExpandingNet(self.new_backbone(pretrained=False))
        student.grow(task.num_seen, 0)
        student.blocks[0].load_state_dict(self.network.blocks[0].state_dict())
        with torch.no_grad():
            student.head.weight[: task.num_old] = old_head.weight
            student.head.bias[: task.num_old] = old_head.bias
        return student

    def also_tested(self) -> dict[str, nn.Module]:
        return {"student": self.student or self.network}

    def begin_task(self, task: Task) -> None:
        self._zero_old_features()

    def phases(self, task: Task) -> Iterator[Phase]:
        options = self.config.options
        boosting = self.main_phase(task)
        if self.student is None:
            yield boosting
            return
        counts = torch.from_numpy(self.class_counts(task))
        self.weights = balanced_weights(counts, options.beta1).to(self.device)
        yield replace(boosting, name="boosting")
        self.weights = balanced_weights(counts, options.beta2).to(self.device)
        compression = self.main_phase(
            task, self.student.parameters(), options.compression_epochs, options.compression_weight_decay
        )
        yield replace(compression, name="compression", network=self.student, loss=self.compression_loss)

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        if self.student is None or not task.num_new:
            return
        options = self.config.options
        head = self.network.head
        is_aligned = options.is_teacher_wa
        if run.number:
            head = self.student.head
            is_aligned = options.is_student_wa
        if is_aligned:
            head.align(task.num_old, options.wa_value ** (task.num_old / task.num_new))

    def class_counts(self, task: Task) -> np.ndarray:
        """The number of training images of each class, by which the losses are weighted: int64 (num_seen,)."""
        return np.bincount(self.manager.train_targets[self.batches.indices(task)], minlength=task.num_seen)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.network.extract(batch.images)
        logits = self.network.classify(features).float()
        if self.old_head is None:
            return self.over.cross_entropy(logits, batch.targets), logits
        options = self.config.options
        newest = self.over.cross_entropy(self.network.classify_newest(features).float(), batch.targets)
        old = distillation(logits[:, : self.num_old], self.old_head(features[:, : self.network.out_dim]), options.T)
        return self.over.cross_entropy(logits / self.weights, batch.targets) + newest + options.lambda_okd * old, logits

    def compression_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.student is not None
        with torch.no_grad():
            soft = self.network(batch.images)
        logits = self.student(batch.images).float()
        return distillation(logits, soft, self.config.options.T, self.weights), logits

    def after_step(self) -> None:
        self._zero_old_features()

    @torch.no_grad()
    def _zero_old_features(self):
        """With ``oofc`` "az", keep the new classes' weights on the old features at zero."""
        if self.config.options.oofc == "az" and self.num_old:
            self.network.head.weight[self.num_old :, : self.network.out_dim] = 0
