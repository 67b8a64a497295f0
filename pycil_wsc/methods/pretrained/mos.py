import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, pad
from typing_extensions import Unpack

from pycil_wsc import registry, seeding
from pycil_wsc.data.batches.gaussians import GaussianSource
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UnusableRun
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.class_rows_learner import ClassRows, by_class
from pycil_wsc.networks.heads import NormalHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.tuning.modules import Adapter
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.optimizers.parameter_groups import apart
from pycil_wsc.training.optimizers.schedules import cosine_lr
from pycil_wsc.training.phase import Phase, PhaseRun
from pycil_wsc.training.step.backward import Backward

RIDGE = 1e-4  # added to variances, which else may be 0


@register_learner(
    "mos",
    convnet_type="timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    pretrained=True,
    freeze=["backbone"],
    batch_size=48,
    **dict.fromkeys(("init_epoch", "epochs"), 20),
    **dict.fromkeys(("init_lr", "lrate"), 0.03),
    **dict.fromkeys(("init_milestones", "milestones"), [10]),
    **dict.fromkeys(("init_weight_decay", "weight_decay"), 5e-4),
    scheduler="cosine",
    nme=False,
)
class MOS(ClassRows):
    """MOS (Sun et al., AAAI 2025, https://arxiv.org/abs/2412.09441): adapters for each task, merged and chosen again.

    The adapters of a task begin as those before, and are drawn towards the mean of all earlier ones. Then one head
    learns from normal distributions of all classes' features. An image gets the adapters of the task that the cosines
    with prototypes predict, then those of the task that the head predicts, until the two agree.

    PILOT merges before each block of every pass, in tests, too, where adapters drift towards the mean of earlier ones,
    and predictions depend on how many batches there were. Here only training merges, as often as there by default. Its
    prototypes of later tasks are computed with dropout, ours without. Its head has rows of classes to come, which
    weight decay shrinks a little before their turn; ours grows.
    """

    @dataclass(frozen=True)
    class Options:
        ffn_num: int = key(16, "hidden units of an adapter", low=1)
        adapter_momentum: float = key(
            0.1, "how far a merge moves adapters to the mean of earlier ones", low=0, below=1, decides="later tasks"
        )
        merging: str = key(
            "blocks",
            "when adapters merge: `blocks`, before each block of a training step and after it, as in PILOT; `step`, "
            "once after it",
            choices=("blocks", "step"),
            decides="later tasks",
        )
        reg: float = key(0.1, "weight of the loss that keeps features and class means apart", low=0)
        reg_temperature: float = key(0.8, "its temperature", above=0)
        head_lr_factor: float = key(0.1, "the head's learning rate as a multiple of the adapters'", low=0)
        crct_epochs: int = key(30, "epochs of the head on drawn features", low=0, decides="later tasks")
        ca_lr: float = key(0.005, "their first learning rate; it falls to 0 by a cosine", low=0, decides="later tasks")
        ca_batches: int = key(
            5, "in such an epoch, features of a class, and of a batch, per `batch_size`", low=1, decides="later tasks"
        )
        ca_storage_efficient_method: str = key(
            "covariance",
            "what is kept of a class's features: its `covariance`, its `variance`, or that of some clusters "
            "(`multi-centroid`)",
            choices=("covariance", "variance", "multi-centroid"),
            decides="later tasks",
        )
        n_centroids: int = key(10, "clusters of `multi-centroid`", low=1, decides="later tasks")
        refinements: int = key(4, "how often the head predicts at most", low=1, affects="accuracy")
        ensemble: bool = key(
            True, "add the probabilities of the cosines with the prototypes to the head's", affects="accuracy"
        )

    class Plan(ClassRows.Plan):
        tunes = True
        uses_memory = False
        one_phase = False
        needs_new_classes = True
        expands = True
        epoch_keys = ("epochs", "crct_epochs")
        own_schedules = ("crct_epochs",)
        over_features = ("crct_epochs",)

    network: "RoutedNet"
    means: Tensor  # of each class's features, or of its clusters: (classes, clusters, d)
    spreads: Tensor  # covariances (classes, d, d), or variances (classes, clusters, d)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        options = self.config.options
        width = self.network.backbone.out_dim
        clusters = options.n_centroids if options.ca_storage_efficient_method == "multi-centroid" else 1
        whole = options.ca_storage_efficient_method == "covariance"
        self.register_rows("means", clusters, width)
        self.register_rows("spreads", width if whole else clusters, width)
        self.earlier: list[list[Tensor]] = []  # while a phase merges: means of earlier adapters, by block

    def build(self) -> "RoutedNet":
        return RoutedNet(TunedTransformer(self.new_backbone()), self.config.options)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def begin_task(self, task: Task) -> None:
        if self.config.options.ca_storage_efficient_method == "multi-centroid":
            self._check_clusters(task)

    # ---- a task's adapters and the head ------------------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        options = self.config.options
        main = self.main_phase(task)
        adapters = list(self.network.newest.parameters())
        groups = apart(main.optimizer.param_groups, adapters, others=options.head_lr_factor)
        yield replace(main, optimizer=registry.optimizers[self.config.optimizer](groups, self.config))
        if task.index and options.crct_epochs:
            yield self.alignment(task)

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        if run.number:
            return
        earlier = [blocks_of(part) for part in self.network.backbone.sets[:-1]]
        self.earlier = [
            [torch.stack(alike).mean(0) for alike in zip(*blocks, strict=True)] for blocks in zip(*earlier, strict=True)
        ]

    def end_phase(self, task: Task, run: PhaseRun) -> None:
        if run.number:
            return
        self.earlier = []
        self.keep_statistics(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the logits of the task, and :meth:`orthogonality`."""
        features = self.network.backbone(batch.images)
        logits = self.network.head(features)[:, self.first :].float()
        loss = self.over.cross_entropy(logits, batch.targets - self.first)
        loss = loss + self.config.options.reg * self.orthogonality(features, batch)
        return loss, pad(logits, (self.first, 0), value=-torch.inf)

    def orthogonality(self, features: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of finding each feature and each class mean among all of them, by inner products."""
        temperature = self.config.options.reg_temperature
        means = self.means[: self.first].flatten(0, 1)
        with self.precision.full(features.device):
            rows = features.float()
            whole, places = self.over.rows(rows, batch.whole)
            everything = torch.cat([means, whole])
            of_means = torch.arange(len(means), device=self.device)
            for_own = cross_entropy(rows @ everything.T / temperature, len(means) + places, reduction="none")
            for_means = cross_entropy(means @ everything.T / temperature, of_means, reduction="sum")
        return (self.over.sum(for_own, batch) + for_means) / len(everything)

    def before_step(self, batch: Batch) -> Batch:
        if self.config.options.merging == "blocks":
            self.merge(lambda block: block + 1)  # PILOT's before this block's forward pass
        return batch

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        if self.config.options.merging == "blocks":
            self.merge(lambda block: len(self.earlier) - 1 - block)  # and before those of later blocks

    def after_step(self) -> None:
        self.merge(lambda block: 1)

    @torch.no_grad()
    def merge(self, times: Callable[[int], int]) -> None:
        """A <- (1 - m) A + m mean(A of earlier tasks), ``times(block)`` times."""
        if not self.earlier:
            return
        kept = 1 - self.config.options.adapter_momentum
        for block, (adapter, mean) in enumerate(zip(blocks_of(self.network.newest), self.earlier, strict=True)):
            torch._foreach_lerp_(adapter, mean, 1 - kept ** times(block))

    # ---- what is known of a class, and what the head learns from it --------------------------------------------------

    def keep_statistics(self, task: Task) -> None:
        """Keep means and spreads of the new classes' features with the newest adapters."""
        kind = self.config.options.ca_storage_efficient_method
        targets = self.manager.train_targets[task.train_indices]
        for label, features in by_class(self.features_with(task.index, task.train_indices), targets):
            if kind == "multi-centroid":
                means, spreads = self._clusters(features, label)
            else:
                means = features.mean(0, keepdims=True)
                covariance = np.atleast_2d(np.cov(features, rowvar=False, ddof=min(1, len(features) - 1)))
                covariance += RIDGE * np.eye(len(covariance))
                spreads = covariance if kind == "covariance" else covariance.diagonal().copy()
            self.means[label] = torch.from_numpy(means).float()
            self.spreads[label] = torch.from_numpy(spreads).float()

    def _clusters(self, features: np.ndarray, label: int) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances of the clusters of a class's features: (clusters, d) each."""
        from sklearn.cluster import KMeans

        seed = seeding.derived_seed(self.config.seed, "clusters", label) % 2**32  # all that it takes
        clusters = KMeans(self.config.options.n_centroids, n_init="auto", random_state=seed).fit_predict(features)
        parts = [part for _, part in by_class(features, clusters)]
        return np.stack([part.mean(0) for part in parts]), np.stack([part.var(0) for part in parts])

    def _check_clusters(self, task: Task) -> None:
        wanted = self.config.options.n_centroids
        labels, counts = np.unique(self.manager.train_targets[task.train_indices], return_counts=True)
        if counts.min() < wanted:
            name = int(labels[counts.argmin()])
            raise UnusableRun(
                f"n_centroids: class {name} has {counts.min()} images, too few for {wanted} clusters; give fewer, or "
                "another ca_storage_efficient_method"
            )

    def alignment(self, task: Task) -> Phase:
        """The head alone, on features drawn anew in each epoch."""
        options = self.config.options
        rows = options.ca_batches * self.config.batch_size
        head = self.network.head
        group = {"params": list(head.parameters()), "lr": 0.0, "weight_decay": self.config.weight_decay}
        return Phase(
            name="alignment",
            epochs=options.crct_epochs,
            optimizer=registry.optimizers["sgd"]([group], self.config),
            lr=cosine_lr(options.ca_lr, options.crct_epochs),
            indices=np.arange(task.num_seen * rows),
            targets=np.repeat(np.arange(task.num_seen), rows),
            source=self.distributions(rows),
            batch_size=rows,
            loss=self.head_loss,
            network=head,
            images=len(task.train_indices),
        )

    def distributions(self, rows: int) -> GaussianSource:
        """Those of all classes, of which each gives ``rows`` features."""
        labels = torch.arange(len(self.means), device=self.device)
        if self.config.options.ca_storage_efficient_method == "covariance":
            roots = torch.linalg.cholesky(self.spreads.cpu().double()).float()
            return GaussianSource(self.means[:, 0], roots, labels, rows, self.device)
        means = self.means.flatten(0, 1)
        variances = self.spreads.flatten(0, 1)
        labels = labels.repeat_interleave(self.means.shape[1])
        if self.config.options.ca_storage_efficient_method == "multi-centroid":
            several = variances.any(1)  # clusters of one image are left out
            means, variances, labels = means[several], variances[several] + RIDGE, labels[several]
        return GaussianSource(means, variances.sqrt(), labels, rows, self.device)

    def head_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of features."""
        logits = self.network.head(batch.images).float()
        return cross_entropy(logits, batch.targets), logits

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        """Prototypes of the new classes, with the adapters of the first task."""
        targets = self.manager.train_targets[task.train_indices]
        for label, features in by_class(self.features_with(0, task.train_indices), targets):
            self.network.prototypes[label] = torch.from_numpy(features.mean(0))

    def features_with(self, adapters: int, indices: np.ndarray) -> np.ndarray:
        """Features of training samples with the adapters of one task: float32 (n, d)."""
        self.network.only = adapters
        try:
            return self.outputs.features(indices)
        finally:
            self.network.only = None

    def classify(self, features: Tensor) -> Tensor:
        with self.precision.full(features.device):
            return self.network.classify(features.float())


def blocks_of(adapters: torch.nn.Module) -> list[list[Tensor]]:
    """The parameters of a set of adapters, block by block."""
    return [list(adapter.parameters()) for adapter in adapters.children()]


class RoutedNet(IncrementalNet):
    """Adapters for each task, features with each of them, (B, tasks x d), and which of them are an image's."""

    backbone: TunedTransformer
    prototypes: Tensor  # the mean feature of each class with the first adapters: (classes, d)
    task_of: Tensor  # of each class: int64 (classes,)

    def __init__(self, backbone: TunedTransformer, options: MOS.Options):
        super().__init__(backbone, NormalHead)
        self.options = options
        self.only: int | None = None  # the one task whose adapters give features, while statistics are computed
        self.register_buffer("prototypes", torch.empty(0, backbone.out_dim))
        self.register_buffer("task_of", torch.empty(0, dtype=torch.int64))

    @property
    def newest(self) -> torch.nn.Module:
        return self.backbone.sets[-1]

    def grow(self, num_classes: int) -> None:
        new = num_classes - self.head.out_features
        tasks = len(self.backbone.sets)
        if tasks:
            successor = copy.deepcopy(self.newest)
            self.newest.requires_grad_(False)
            self.backbone.sets.append(successor)
        else:
            self.backbone.add_blocks(Adapter, hidden=self.options.ffn_num)
        self.prototypes = pad(self.prototypes, (0, 0, 0, new))
        self.task_of = pad(self.task_of, (0, new), value=tasks)
        super().grow(num_classes)

    def extract(self, images: Tensor) -> Tensor:
        routes = range(len(self.backbone.sets)) if self.only is None else [self.only]
        return torch.cat([self.backbone(images, route=route) for route in routes], 1)

    def classify(self, features: Tensor) -> Tensor:
        """(B, tasks x d) -> (B, classes) logits; with ``ensemble`` the logarithm of a mean of probabilities."""
        per_task = features.unflatten(1, (-1, self.backbone.out_dim))
        cosines = normalize(per_task[:, 0]) @ normalize(self.prototypes).T
        logits = self.refined(per_task, self.task_of[cosines.argmax(1)])
        if not self.options.ensemble:
            return logits
        tasks = per_task.shape[1]
        return (logits.softmax(1) + (tasks * cosines).softmax(1)).log()

    def refined(self, per_task: Tensor, chosen: Tensor) -> Tensor:
        """The head's logits (B, classes) when the adapters ``chosen`` (B,) are those of the task it predicts.

        ``per_task``: (B, tasks, d). Where the two agree, further predictions change nothing.
        """
        for _ in range(self.options.refinements):
            places = chosen.view(-1, 1, 1).expand(-1, 1, per_task.shape[2])
            features = per_task.gather(1, places).squeeze(1)
            logits = self.head(features)
            chosen = self.task_of[logits.argmax(1)]
        return logits
