"""The importance that a learner's configuration sets: scores computed from its data, and what they cost."""

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pycil_wsc import registry, seeding
from pycil_wsc.consolidation import Importance, WeightSpaceConsolidation
from pycil_wsc.consolidation.batch_norm import restored_modes
from pycil_wsc.consolidation.importance import as_importance
from pycil_wsc.data.batches.epoch_order import WHOLE
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.devices import synchronize
from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.training.batches import Batches
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.processes import Processes


class Consolidating(Protocol):
    """A phase that is consolidated."""

    wsc: WeightSpaceConsolidation


class Scoring(Protocol):
    """What scores need of a learner whose weights are scored while it is consolidated."""

    config: LearnerConfig
    network: IncrementalNet
    processes: Processes
    device: torch.device
    batches: Batches
    scoring: dict[str, float]  # what it has cost

    @property
    def consolidation(self) -> Consolidating | None: ...


def chosen_importance(learner: Scoring, task: Task) -> Importance:
    """The importance that ``wsc.importance`` sets."""
    importance = learner.config.wsc.score()
    if importance is None:
        importance = as_importance(functools.partial(_score_by_data, learner, task))
    return importance


def _score_by_data(learner, task, params, previous):
    """Scores of a registered importance, in evaluation mode and fp32; records the passes and bytes that it takes."""
    batches = UnaugmentedBatches(learner, task)
    network = learner.network
    costs = learner.scoring
    options = learner.config.wsc
    with restored_modes(network):
        network.eval()
        with refusing_backbone("wsc.importance", options.importance, learner.config.convnet_type):
            scores = registry.importances[options.importance](network, params, previous, batches, options)
    learner.processes.copy_from_first_(scores.values())  # with other rounding, a process might keep other weights
    costs["importance_passes"] += batches.images / len(learner.batches.indices(task))
    costs["importance_bytes"] = max(costs["importance_bytes"], sum(score.nbytes for score in scores.values()))
    return scores


@contextlib.contextmanager
def refusing_backbone(key: str, value: str, backbone: str) -> Iterator[None]:
    """A context in which torch's errors about differentiating or vectorising ``backbone`` are :class:`UnusableRun`."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("derivative for .* is not implemented|torch.func|vmap", str(error)):
            raise
        raise UnusableRun(
            f"{key}: '{value}' cannot be computed for '{backbone}' ({first_line(error)}); choose another value, or "
            "another backbone"
        ) from None


class UnaugmentedBatches:
    """Iterable, any number of times, over the images that the task trains on, without augmentation.

    ``wsc.importance_samples`` limits the number of samples, which are drawn with ``seed``. ``images``: the number of
    images that all processes have passed over so far. ``batches.mean(score(batches.shared()))`` distributes a mean over
    samples among the processes.
    """

    def __init__(self, learner: Scoring, task: Task):
        self.learner = learner
        self.images = 0
        self.passed = 0  # images that this process has last passed over
        resets = learner.consolidation.wsc.resets if learner.consolidation else 0
        self.seed = seeding.derived_seed(learner.config.seed, "importance", task.index, resets)
        indices = learner.batches.indices(task)
        wanted = learner.config.wsc.importance_samples
        self.indices = indices if wanted is None else np.random.default_rng(self.seed).permutation(indices)[:wanted]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._batches(WHOLE):
            self.images += len(images)
            yield images, labels

    def shared(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the batches.

        A process without a share gets the first batch, since a score needs samples; its score then weighs nothing.
        """
        self.images += len(self.indices)
        self.passed = 0
        for images, labels in self._batches(self.learner.processes.share_of_batches):
            self.passed += len(images)
            yield images, labels
        if not self.passed:
            yield from self._batches(WHOLE, self.learner.config.batch_size)

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean over all samples, from ``values``, the mean over those that this process has just passed over."""
        processes = self.learner.processes
        weight = self.passed / len(self.indices)
        if processes.count == 1:
            return dict(values)
        total = {}
        for name, value in values.items():
            total[name] = processes.sum_(weight * value if weight else torch.zeros_like(value))
        return total

    def _batches(self, share, number=None):
        """Batches of all samples, or of the first ``number``."""
        return self.learner.batches.plain(self.indices[:number], share=share)


@contextlib.contextmanager
def cost_of_scoring(learner: Scoring, at_reset: bool) -> Iterator[None]:
    """A context that records in ``learner.scoring`` the seconds within it.

    Only ``at_reset`` does it wait for the device: a step must not, so that on a GPU its launch alone is timed.
    """
    if at_reset:
        synchronize(learner.device)
    start = time.perf_counter()
    yield
    if at_reset:
        synchronize(learner.device)
    learner.scoring["importance_seconds"] += time.perf_counter() - start
