import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_embedding_loss, normalize

from pycil_wsc import seeding
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.distillation.distilling import DistillingLearner
from pycil_wsc.networks.heads import ProxyHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.stages import stages_of, with_stages
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.optimizers.schedules import cosine_lr
from pycil_wsc.training.phase import Phase, PhaseRun

Features = Callable[[np.ndarray], np.ndarray]
MapClasses = Callable[..., Iterable[np.ndarray]]


@register_learner(
    "podnet",
    convnet_type="cosine_resnet32",
    init_epoch=160,
    init_milestones=[],
    epochs=160,
    milestones=[],
    weight_decay=5e-4,
    scheduler="cosine",
)
class PODNet(DistillingLearner):
    """PODNet (Douillard et al., 2020): distils the sums over rows and columns of each stage, and the features.

    A class is a set of proxies, trained with the NCA loss. A second phase trains on a balanced set: the exemplars and
    as many new images of each class, chosen by the network of the first phase.
    """

    @dataclass(frozen=True)
    class Options:
        nb_proxy: int = key(10, "proxies of each class", low=1, high=2**20)
        margin: float | None = key(
            None, "margin of the paper's NCA loss (there 0.6); null: PyCIL's loss, whose margin cancels itself", low=0
        )
        lambda_c_base: float = key(5.0, "weight of the stages' distillation", low=0, decides="later tasks")
        lambda_f_base: float = key(1.0, "weight of the features' distillation", low=0, decides="later tasks")
        ft_epochs: int = key(20, "epochs of the second phase", low=1, decides="later tasks")
        ft_lrate: float = key(0.005, "initial learning rate of the second phase", low=0, decides="later tasks")

    class Plan(DistillingLearner.Plan):
        one_phase = False
        epoch_keys = ("epochs", "ft_epochs")
        own_schedules = ("ft_epochs",)

        def check(self) -> str | None:
            if self.config.label_smoothing:
                return "label_smoothing: has no part in the loss of 'podnet'; leave it out"
            return super().check()

        def check_backbone(self, backbone: nn.Module) -> None:
            stages_of(backbone)

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            balanced = balanced_set(memory, task, targets, 0) if task.index else ()
            epochs = self.config.epochs if task.index else self.config.init_epoch
            return epochs * (len(task.train_indices) + len(memory)) + self.config.options.ft_epochs * len(balanced)

    balanced: list[int] | None = None  # the samples of the second phase, while it trains

    def build(self) -> IncrementalNet:
        head = functools.partial(ProxyHead, proxies=self.config.options.nb_proxy)
        return IncrementalNet(self.new_backbone(), head)

    def begin_task(self, task: Task) -> None:
        self.balanced = None

    def phases(self, task: Task) -> Iterator[Phase]:
        yield self.main_phase(task)
        if self.balanced:
            c, options = self.config, self.config.options
            yield replace(
                self.main_phase(task, epochs=options.ft_epochs),
                name="balanced",
                lr=cosine_lr(options.ft_lrate, options.ft_epochs, c.min_lr),
                indices=np.array(self.balanced),
                mixed=False,
            )

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        if not task.index or run.number:
            return
        seed = seeding.derived_seed(self.config.seed, "balanced", task.index)
        targets = self.manager.train_targets
        chosen = balanced_set(self.memory, task, targets, seed, self.outputs.features, self.processes.map)
        self.balanced = chosen.tolist()

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options, before = self.config.options, None
        if self.teacher is not None:
            with torch.no_grad():
                before = with_stages(self.teacher.backbone, batch.images)
        features, stages = with_stages(self.network.backbone, batch.images)
        logits = self.network.classify(features).float()
        loss = self.over.weighted(nca(logits, batch.targets, self.network.head.scale, options.margin)).mean()
        if before is not None:
            factor = math.sqrt(self.num_seen / max(1, self.num_seen - self.num_old))
            same = torch.ones(len(features), device=features.device)
            flat = cosine_embedding_loss(features.float(), before[0].float(), same)
            loss = loss + factor * (options.lambda_f_base * flat + options.lambda_c_base * pooled(stages, before[1]))
        return loss, logits

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"balanced": self.balanced}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.balanced = state["balanced"]


def balanced_set(
    memory: ExemplarMemory,
    task: Task,
    targets: np.ndarray,
    seed: int,
    features: Features | None = None,
    map_classes: MapClasses = map,
) -> np.ndarray:
    """The exemplars, and as many samples of each class of the task: int64 (n,). ``memory`` is not changed."""
    chosen = copy.deepcopy(memory)
    quotas, rng = [memory.quota(task.num_old)] * task.num_seen, np.random.default_rng(seed)
    chosen.update(task, targets, features, rng, map_classes, quotas)
    return chosen.indices


def nca(logits: Tensor, targets: Tensor, scale: Tensor, margin: float | None) -> Tensor:
    """The NCA loss of each image: -log(exp(z_y - scale x margin) / sum of exp(z_k) over k != y), where positive.

    (B, classes) -> (B,).
    ``margin`` None: PyCIL's loss, log(1 + sum of exp(z_k - max z) over k != y) - (z_y - max z).
    """
    of_class = torch.zeros_like(logits, dtype=torch.bool).scatter(1, targets[:, None], True)
    score = logits.gather(1, targets[:, None]).squeeze(1)
    if margin is not None:
        others = logits.masked_fill(of_class, torch.finfo(logits.dtype).min).logsumexp(1)
        return (others - score + scale * margin).relu()
    largest = logits.max(1).values
    others = (logits - largest[:, None]).exp().masked_fill(of_class, 1.0).sum(1)
    return others.log() - score + largest


def pooled(stages: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """POD-spatial: the mean distance of the normalised sums of squares over columns and rows."""
    distances = [(sums(new) - sums(old)).norm(dim=1).mean() for new, old in zip(stages, before, strict=True)]
    return torch.stack(distances).mean()


def sums(stage: Tensor) -> Tensor:
    """(B, c, H, W) -> (B, c (H + W)), or the tokens of a transformer (B, n, d) -> (B, n + d), of unit length."""
    squares = stage.float().square()
    return normalize(torch.cat([squares.sum(-1).flatten(1), squares.sum(-2).flatten(1)], 1))
