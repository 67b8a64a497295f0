from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.wa import WA
from pycil_wsc.networks.nets import BiasCorrectedNet
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.phase import Phase


@register_learner(
    "bic",
    init_epoch=170,
    init_milestones=[60, 100, 140],
    init_weight_decay=2e-4,
    epochs=170,
    milestones=[60, 100, 140],
)
class BiC(WA):
    """Bias correction (Wu et al., 2019): a second phase learns a scale and a shift for the newest task's logits.

    The first phase uses WA's loss on corrected logits; the second trains on held-out samples. The option ``validation``
    sets how many samples of each class are held out, rounded down: ``pycil`` is split_ratio x memory_size / old
    classes, regardless of the memory; ``per_class`` is split_ratio x memory_per_class or, if it is smaller, x the size
    of the largest old class, but at least 1 if this number is 2 or more. The number is at most the size of the smallest
    old class and half that of the smallest new class; if it is 0, there is no second phase.
    """

    network: BiasCorrectedNet

    @dataclass(frozen=True)
    class Options(WA.Options):
        split_ratio: float = key(
            0.1, "fraction of the memory held out for the second phase", above=0, below=1, decides="later tasks"
        )
        validation: str = key(
            "pycil",
            "the number that `split_ratio` is a fraction of: `memory_size` / old classes (`pycil`), or "
            "`memory_per_class` (`per_class`, at least 1 if there are 2 or more)",
            choices=("pycil", "per_class"),
            decides="later tasks",
        )

    class Plan(WA.Plan):
        one_phase = False

        def also_reads(self) -> set[str]:
            return {"memory_size" if self.config.options.validation == "pycil" else "memory_per_class"}

    def build(self) -> BiasCorrectedNet:
        return BiasCorrectedNet(self.new_backbone())

    def phases(self, task: Task) -> Iterator[Phase]:
        validation = self.validation_samples(task)
        main = self.main_phase(task, [*self.network.backbone.parameters(), *self.network.head.parameters()])
        if len(validation):  # else the batches are Replay's, with which it shares the first task
            main = replace(main, indices=np.setdiff1d(main.indices, validation))
        yield main
        if len(validation):
            yield replace(
                self.main_phase(task, [self.network.corrections[-1]]),
                name="bias correction",
                lr=main.lr,
                indices=validation,
                loss=self.correction_loss,
                mixed=False,
            )

    def validation_samples(self, task: Task) -> np.ndarray:
        """Indices for the second phase, drawn at random, the same number of every class: int64 (n,)."""
        if not task.index:
            return np.empty(0, np.int64)
        c = self.config
        options = self.config.options
        indices = self.batches.indices(task)
        targets = self.manager.train_targets[indices]
        counts = np.bincount(targets, minlength=task.num_seen)
        old, new = counts[: task.num_old], counts[task.num_old :]
        if options.validation == "pycil":
            number = int(options.split_ratio * (c.memory_size / task.num_old))
        else:
            number = int(options.split_ratio * min(c.memory_per_class, old.max()))
            if old.min() > 1:
                number = max(number, 1)
        number = min(number, old.min(), new.min() // 2)
        rng = np.random.default_rng(seeding.derived_seed(c.seed, "validation", task.index))
        return np.concatenate([rng.permutation(indices[targets == k])[:number] for k in range(task.num_seen)])

    def correction_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the softmax applied twice, as in PyCIL; batch norm sees these images in training mode."""
        with torch.no_grad():
            features = self.network.extract(batch.images)
        logits = self.network.classify(features)
        return cross_entropy(logits.softmax(1), batch.targets), logits

    def end_task(self, task: Task) -> None:
        """Replaces WA's alignment of the head: the bias correction takes its place."""
