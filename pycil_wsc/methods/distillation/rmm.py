"""RMM on top of iCaRL and FOSTER: how much of the budget new data and exemplars get, and which class how many."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from pycil_wsc import registry, seeding
from pycil_wsc.data.batches.epoch_order import batch_slices
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.icarl import ICaRL
from pycil_wsc.methods.growing.foster import FOSTER
from pycil_wsc.registry import register_learner
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.learner_config import LearnerConfig

M_RATES = "per task, the fraction of its images to give up for more exemplars; the last rate applies to all later tasks"
C_RATES = "per task: classes whose mean loss is above the median get this fraction fewer exemplars, the others more"
OF_CLASSES = (0.0, 0.0, 0.1, 0.1, 0.1, 0.0)  # in both files of PyCIL


class RMM(BaseLearner):
    """Reinforced Memory Management (Liu et al., NeurIPS 2021, https://arxiv.org/abs/2301.05792) with fixed rates: a
    mixin, placed before a learner.

    Of a later task's images, some are left out, drawn once, and the memory grows by as many exemplars. In the paper a
    policy chooses the rates.
    """

    class Plan(BaseLearner.Plan):
        measures_quotas = True

        def __init__(self, config: LearnerConfig) -> None:
            super().__init__(config)
            self.above: dict[int, np.ndarray] = {}  # task -> whether each new class's loss is above the median

        def check(self) -> str | None:
            for name in ("m_rate_list", "c_rate_list"):
                if not getattr(self.config.options, name):
                    return f"{name}: is empty; give a rate for each task, or one for all"
            if not registry.exemplars[self.config.exemplars].by_class:
                choice = self.config.exemplars
                return f"exemplars: RMM gives each class a number of its own, which '{choice}' does not follow"
            return super().check()

        def new_samples(self, task: Task, targets: np.ndarray) -> np.ndarray:
            return drawn(self.config, task, targets)

        def quotas(self, task: Task, manager: TaskSequence) -> Sequence[int]:
            before_training = np.arange(task.num_new) < task.num_new // 2
            return shares(self.config, task, manager, self.above.get(task.index, before_training))

    plan: Plan

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        trains = not task.index and (self.config.init_epoch - 1) % 5 != 0
        if task.num_new and (trains or rate_of(self.config.options.c_rate_list, task)):
            means = self.mean_losses(task, trains)
            self.plan.above[task.index] = means > np.median(means)

    @torch.no_grad()
    def mean_losses(self, task: Task, training: bool) -> np.ndarray:
        """The mean cross-entropy of each new class over its images, without augmentation: (new classes,).

        PyCIL's network is in ``training`` mode after the first task, unless it was tested in the last epoch, as in each
        fifth: so its batch norms see the images of one class after the other, and their statistics move.
        """
        self.eval()
        targets = self.manager.train_targets
        means = torch.zeros(task.num_new, device=self.device)
        seeded = seeding.seeded(self.config.seed, "quotas", task.index, device=self.device)
        with seeded:  # dropout draws in training mode
            for place, label in enumerate(range(task.num_old, task.num_seen)):
                indices = task.train_indices[targets[task.train_indices] == label]
                self.network.train(training and len(indices) > 1)  # one image has no variance
                for part in batch_slices(len(indices), self.config.batch_size, join=True):
                    means[place] += self._summed_loss(indices[part]) / len(indices)
        return means.cpu().numpy()

    def _summed_loss(self, indices):
        """The cross-entropy of one batch of samples, summed."""
        ((images, labels),) = self.batches.plain(indices, len(indices))
        with self.precision.autocast():
            logits = self.network(images).float()
        return cross_entropy(logits, labels, reduction="sum")


@register_learner("rmm-icarl", epochs=170, milestones=[80, 120], fixed_memory=False)
class RMMICaRL(RMM, ICaRL):
    """iCaRL with RMM's memory."""

    @dataclass(frozen=True)
    class Options(ICaRL.Options):
        m_rate_list: tuple[float, ...] = key(
            (0.8, 0.8, 0.6, 0.6, 0.6, 0.6), M_RATES, low=0, below=1, decides="later tasks"
        )
        c_rate_list: tuple[float, ...] = key(OF_CLASSES, C_RATES, low=0, high=1, decides="later tasks")


@register_learner("rmm-foster", scheduler="cosine", epochs=170, weight_decay=5e-4, fixed_memory=False)
class RMMFOSTER(RMM, FOSTER):
    """FOSTER with RMM's memory. Its weights of the classes count all images of a new class, as in PyCIL."""

    @dataclass(frozen=True)
    class Options(FOSTER.Options):
        beta1: float = key(
            0.97, "boosting: re-weighting of rare classes (Cui et al., 2019)", low=0, below=1, decides="later tasks"
        )
        m_rate_list: tuple[float, ...] = key(
            (0.3, 0.3, 0.3, 0.4, 0.4, 0.4), M_RATES, low=0, below=1, decides="later tasks"
        )
        c_rate_list: tuple[float, ...] = key(OF_CLASSES, C_RATES, low=0, high=1, decides="later tasks")

    def class_counts(self, task: Task) -> np.ndarray:
        counts = np.bincount(self.manager.train_targets[task.train_indices], minlength=task.num_seen)
        size = len(self.memory)
        if not self.config.is_stream:  # PyCIL's number; as the quotas are rounded down, some of it may stay unused
            size = memory_size(self.config, self.manager.tasks[task.index - 1], self.manager)
        counts[: task.num_old] = size // task.num_old
        return counts


def rate_of(rates: Sequence[float], task: Task) -> float:
    return rates[min(task.index, len(rates) - 1)]


def drawn(config: LearnerConfig, task: Task, targets: np.ndarray) -> np.ndarray:
    """The images of ``task`` that it trains on, drawn with replacement as in PyCIL, but one of each class at least.

    The first task, and one with rate 0, trains on all. Sorted by class: int64 (n,). ``targets``: of the training set.
    """
    rate = rate_of(config.options.m_rate_list, task)
    if not task.index or not rate:
        return task.train_indices
    rng = np.random.default_rng(seeding.derived_seed(config.seed, "new samples", task.index))
    labels = targets[task.train_indices]
    parts = []
    for label in np.unique(labels):
        of_class = task.train_indices[labels == label]
        number = max(1, int((1 - rate) * len(of_class)))
        parts.append(of_class[np.sort(rng.integers(len(of_class), size=number))])
    return np.concatenate(parts)


def memory_size(config: LearnerConfig, task: Task, manager: TaskSequence) -> int:
    """The number of exemplars after ``task``: the memory's keys, and a fraction of the images of ``increment`` classes,
    or with ``increments`` of those of the task.

    With ``tasks`` or ``domains``, the rate and the images are the task's own. Else, as in PyCIL, a rate of 0 keeps the
    previous size, and a class counts as the largest of the training set.
    """
    usual = config.memory_per_class * task.num_seen if config.fixed_memory else config.memory_size
    if config.is_stream:
        return usual + int(rate_of(config.options.m_rate_list, task) * len(task.train_indices))
    rated = [earlier for earlier in manager.tasks[: task.index + 1] if rate_of(config.options.m_rate_list, earlier)]
    if not rated:
        return usual
    rate = rate_of(config.options.m_rate_list, rated[-1])
    largest = largest_class(manager)
    increment = rated[-1].num_new if config.increments else config.increment
    return min(rated[-1].num_seen * largest - 1, usual + int(rate * increment * largest))


def largest_class(manager: TaskSequence) -> int:
    return int(np.bincount(manager.train_targets).max())


def shares(config: LearnerConfig, task: Task, manager: TaskSequence, above: np.ndarray) -> list[int]:
    """The number of exemplars of each class seen; ``above``: bool (new classes,), its mean loss is above the median."""
    equal = memory_size(config, task, manager) // task.num_seen
    rate = rate_of(config.options.c_rate_list, task)
    largest = largest_class(manager)
    fewer, more = (min(largest, int(equal * factor)) for factor in (1 - rate, 1 + rate))
    return [equal] * task.num_old + [fewer if is_above else more for is_above in above]
