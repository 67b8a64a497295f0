from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, pad

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prototypes.class_rows_learner import by_class
from pycil_wsc.networks.heads import CosineHead
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.networks.tuning.modules import Adapter
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner


@register_learner(
    "ease",
    convnet_type="timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
    pretrained=True,
    freeze=["backbone"],
    batch_size=48,
    **dict.fromkeys(("init_epoch", "epochs"), 20),
    **dict.fromkeys(("init_lr", "lrate"), 0.025),
    **dict.fromkeys(("init_milestones", "milestones"), []),
    **dict.fromkeys(("init_weight_decay", "weight_decay"), 5e-4),
    scheduler="cosine",
    nme=False,
)
class EASE(BaseLearner):
    """EASE (Zhou et al., CVPR 2024, https://arxiv.org/abs/2403.12030): adapters for each task, prototypes in all.

    A task trains adapters of its own with a cosine classifier of its classes, which is then thrown away. A class is its
    mean feature with the adapters of each task so far. With those of later tasks, when its images are gone, it is a
    mean of the new classes' prototypes, weighted by their similarity to it where both are known.

    A prediction needs a pass of each task's adapters. As in PILOT, whose oracle ``use_old_data`` and imitation of APER
    (``moni_adam``) are not here: see ``aper_adapter``.
    """

    @dataclass(frozen=True)
    class Options:
        ffn_num: int = key(64, "hidden units of an adapter", low=1)
        use_reweight: bool = key(
            True,
            "a class's logit is its cosine with the adapters of its own task and `alpha` times the mean of the others; "
            "false: the cosine of all features together",
            affects="accuracy",
        )
        alpha: float = key(0.1, "weight of the mean cosine with the adapters of other tasks", low=0, affects="accuracy")
        use_init_ptm: bool = key(False, "there are also prototypes of the transformer without adapters")
        beta: float = key(0.0, "weight of the cosine without adapters", low=0, affects="accuracy")
        use_diagonal: bool = key(
            False, "a class has only the prototype with the adapters of its own task", affects="accuracy"
        )
        recalc_sim: bool = key(
            True,
            "after each task, prototypes of old classes are found again from all classes since; false: those with the "
            "newest adapters alone, from the newest classes",
            decides="later tasks",
            affects="accuracy",
        )

    class Plan(BaseLearner.Plan):
        tunes = True
        uses_memory = False
        expands = True

    network: "SubspaceNet"

    def build(self) -> "SubspaceNet":
        return SubspaceNet(TunedTransformer(self.new_backbone()), self.config.options)

    def grow(self, task: Task) -> None:
        super().grow(task)
        self.first = self.manager.first_class(task)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.network.backbone(batch.images)
        with self.precision.full(features.device):
            logits = self.network.proxies(features.float())[:, self.first :]
        loss = self.over.cross_entropy(logits, batch.targets - self.first)
        return loss, pad(logits, (self.first, 0), value=-torch.inf)

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        """Prototypes of the task's classes from their images, and of the others from these."""
        targets = self.manager.train_targets[task.train_indices]
        for label, features in by_class(self.outputs.features(task.train_indices), targets):
            self.network.head.set(label, torch.from_numpy(features.mean(0)))
        self.network.head.complete()

    def classify(self, features: Tensor) -> Tensor:
        """In fp32, whatever the precision: many cosines are equal in bf16."""
        with self.precision.full(features.device):
            return self.network.classify(features.float())


class SubspaceNet(IncrementalNet):
    """Adapters for each task, and features with each of them: (B, 3, H, W) -> (B, subspaces x d)."""

    backbone: TunedTransformer

    def __init__(self, backbone: TunedTransformer, options: EASE.Options):
        super().__init__(backbone, lambda width: SubspaceHead(width, options))
        self.hidden = options.ffn_num
        self.proxies = CosineHead(backbone.out_dim)  # for training alone, new in each task

    def grow(self, num_classes: int) -> None:
        for earlier in self.backbone.sets:
            earlier.requires_grad_(False)
        self.backbone.add_blocks(Adapter, hidden=self.hidden)
        self.proxies = CosineHead(self.backbone.out_dim, num_classes)
        super().grow(num_classes)

    def extract(self, images: Tensor) -> Tensor:
        routes = [*[None] * self.head.plain, *range(len(self.backbone.sets))]
        return torch.cat([self.backbone(images, route=route) for route in routes], 1)


class SubspaceHead(nn.Module):
    """Cosines with the prototypes of each class in each subspace: the features with the adapters of one task.

    With ``use_init_ptm`` there is one more, before them: the features without adapters.

    Args:
        width: d, of a subspace.
    """

    weight: Tensor  # the prototypes: (classes, subspaces x d)
    task_of: Tensor  # the task that brought each class: int64 (classes,)
    seen_in: Tensor  # the newest task with images of each class: int64 (classes,)

    def __init__(self, width: int, options: EASE.Options):
        super().__init__()
        self.in_features = width
        self.options = options
        self.plain = int(options.use_init_ptm)  # subspaces before those of the adapters
        self.tasks = 0
        self.register_buffer("weight", torch.empty(0, self.plain * width))
        self.register_buffer("task_of", torch.empty(0, dtype=torch.int64))
        self.register_buffer("seen_in", torch.empty(0, dtype=torch.int64))

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def grow(self, num_classes: int) -> None:
        """A row for each new class and the columns of another task, all 0."""
        new = num_classes - self.out_features
        self.weight = pad(self.weight, (0, self.in_features, 0, new))
        self.task_of = pad(self.task_of, (0, new), value=self.tasks)
        self.seen_in = pad(self.seen_in, (0, new), value=self.tasks)
        self.tasks += 1

    def set(self, label: int, means: Tensor) -> None:
        """Set the prototypes of a class of the newest task to its mean features: (subspaces x d,)."""
        self.weight[label] = means.to(self.weight.device)
        self.seen_in[label] = self.tasks - 1

    @torch.no_grad()
    def complete(self) -> None:
        """What the prototypes of the newest task's classes, which have been set, say of those of the others."""
        prototypes = self.weight.unflatten(1, (-1, self.in_features))  # (classes, subspaces, d), a view
        newest = self.tasks - 1
        if self.options.use_diagonal:
            others = self.task_of[:, None] != torch.arange(self.tasks, device=self.task_of.device)
            prototypes[:, self.plain :][others] = 0
            return
        for adapters in range(1 if self.options.recalc_sim else newest, newest + 1):
            later = prototypes[self.seen_in >= adapters]
            for task in range(adapters):
                gone = (self.task_of == task) & (self.seen_in < adapters)  # before these adapters were there
                columns = self.plain + task  # where both the old classes and the later ones have had images
                similarity = normalize(prototypes[gone, columns]) @ normalize(later[:, columns]).T
                prototypes[gone, self.plain + adapters] = similarity.softmax(1) @ later[:, self.plain + adapters]

    def forward(self, features: Tensor) -> Tensor:
        """(B, subspaces x d) -> (B, classes) logits."""
        if not self.options.use_reweight:
            return linear(normalize(features), normalize(self.weight))
        per_subspace = normalize(features.unflatten(1, (-1, self.in_features)), dim=2)
        prototypes = normalize(self.weight.unflatten(1, (-1, self.in_features)), dim=2)
        cosines = torch.einsum("bsd, csd -> bcs", per_subspace, prototypes)
        return (cosines * self._shares()).sum(2)

    def _shares(self) -> Tensor:
        """The weight of each cosine in a class's logit: (classes, subspaces)."""
        numbers = torch.arange(self.tasks, device=self.task_of.device)
        other = self.options.alpha / max(self.tasks - 1, 1)
        shares = torch.where(self.task_of[:, None] == numbers, 1.0, other)
        return pad(shares, (self.plain, 0), value=self.options.beta)
