import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention
from torch.nn.modules.batchnorm import _BatchNorm

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.errors import UserError
from pycil_wsc.keys import key
from pycil_wsc.methods.losses import newest_task_targets
from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, ExpandingNet
from pycil_wsc.networks.stages import stages_of, tokens_of_last_stage
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase


@register_learner("tagfex", epochs=170, milestones=[80, 120, 150])
class TagFex(BaseLearner):
    """TagFex (Zheng et al., CVPR 2025): DER, with a task-agnostic backbone that is trained with a contrastive loss.

    Each image has two views. The task-agnostic backbone is trained with InfoNCE on them, and to predict the features
    that it gave before the task. Attention merges its last feature map with that of the newest block; if a head on the
    merged features has the lower loss, it is distilled into the block.
    """

    network: "TaskAgnosticNet"

    @dataclass(frozen=True)
    class Options:
        infonce_temp: float = key(0.2, "temperature of the contrastive loss (InfoNCE)", above=0)
        contrast_factor: float = key(1.0, "weight of the contrastive loss and its distillation", low=0)
        proj_hidden_dim: int = key(2048, "hidden dimension of the projector", low=1, high=2**20)
        proj_output_dim: int = key(1024, "output dimension of the projector", low=1, high=2**20)
        attn_num_heads: int = key(8, "heads of the attention that merges the two feature maps", low=1)
        init_interpolation_factor: float = key(
            0.95, "weight of the previous block in the weights of a new one", low=0, high=1, decides="later tasks"
        )
        infonce_kd_temp: float = key(0.2, "temperature of the contrastive distillation", above=0, decides="later tasks")
        contrast_kd_factor: float = key(2.0, "weight of the contrastive distillation", low=0, decides="later tasks")
        aux_factor: float = key(2.0, "weight of the auxiliary head's loss", low=0, decides="later tasks")
        trans_cls_factor: float = key(1.0, "weight of the merged head's loss", low=0, decides="later tasks")
        transfer_factor: float = key(
            1.0, "weight of the merged head's distillation into the newest block", low=0, decides="later tasks"
        )
        kd_temp: float = key(2.0, "temperature of the merged head's distillation", above=0, decides="later tasks")

    class Plan(BaseLearner.Plan):
        expands = True

        def check_backbone(self, backbone: nn.Module) -> None:
            stages_of(backbone)

    teacher: nn.Module | None

    def build(self) -> nn.Module:
        options = self.config.options
        source = self.batches.source
        side = source.info.image_size if source else 32
        sizes = options.proj_hidden_dim, options.proj_output_dim, options.attn_num_heads
        return TaskAgnosticNet(self.new_backbone(), self.new_backbone(), side, *sizes)

    def grow(self, task: Task) -> None:
        self.num_old, self.num_seen, network = task.num_old, task.num_seen, self.network
        self.teacher = None
        if task.index:
            parts = {"backbone": network.agnostic, "projector": network.projector}
            self.teacher = copy.deepcopy(nn.ModuleDict(parts)).requires_grad_(False)
        network.grow_from(task.num_seen, task.num_new, self.config.options.init_interpolation_factor)
        network.blocks[:-1].requires_grad_(False)

    def phases(self, task: Task) -> Iterator[Phase]:
        yield replace(self.main_phase(task), views=2)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options, network = self.config.options, self.network
        images, targets = torch.cat([batch.images, *batch.views]), batch.targets.repeat(2)
        features, tokens = network.extract_with_tokens(images)
        logits = network.classify(features).float()
        agnostic = tokens_of_last_stage(network.agnostic, images)[1]
        embedding = network.projector(agnostic.mean(1))
        right = self.over.cross_entropy(logits, targets, targets)
        contrast = self.contrast(embedding, embedding, options.infonce_temp, batch.whole)
        if self.teacher is None:
            return right + options.contrast_factor * contrast, logits[: len(batch)]
        newest = network.classify_newest(features).float()
        auxiliary = self.over.cross_entropy(newest, newest_task_targets(targets, self.num_old), targets)
        kept, known = self.kept(images, agnostic, batch.whole), self.num_old / self.num_seen
        contrast = (1 - known) * contrast + known * options.contrast_kd_factor * kept
        loss = right + options.aux_factor * auxiliary + options.contrast_factor * contrast
        return loss + self.transfer(agnostic, tokens, logits, targets, right), logits[: len(batch)]

    def contrast(self, rows: Tensor, columns: Tensor, temperature: float, whole: int | None) -> Tensor:
        """InfoNCE (van den Oord et al., 2018) by cosine: each row's positive is the column of its image's other view.

        (2 B, d) twice, first views before second ones. No row is compared with the column of the same view.
        """
        with torch.autocast(self.device.type, enabled=False):
            first, second = normalize(columns.float()).chunk(2)
            both, places = self.over.rows(torch.cat([first, second], 1), whole)
            same, other = torch.cat([places, places + len(both)]), torch.cat([places + len(both), places])
            similarity = normalize(rows.float()) @ torch.cat(both.chunk(2, 1)).T / temperature
            return cross_entropy(similarity.scatter(1, same[:, None], -torch.inf), other)

    def kept(self, images: Tensor, agnostic: Tensor, whole: int | None) -> Tensor:
        """The contrast between the predicted features of the previous task and the true ones."""
        assert isinstance(self.teacher, nn.ModuleDict)
        before = tokens_of_last_stage(self.teacher["backbone"], images)[1].mean(1)
        predicted = self.network.predictor(agnostic.mean(1))
        projector = self.teacher["projector"]
        return self.contrast(projector(predicted), projector(before), self.config.options.infonce_kd_temp, whole)

    def transfer(self, agnostic: Tensor, tokens: Tensor, logits: Tensor, targets: Tensor, right: Tensor) -> Tensor:
        """The loss of the merged head on new classes, and its distillation if it is below ``right``."""
        options, new = self.config.options, targets >= self.num_old
        if self.num_old == self.num_seen:
            return right.new_zeros(())
        merged = self.network.attention(agnostic.detach(), tokens).mean(1)
        guide = self.network.merged_head(merged).float()
        errors = cross_entropy(guide, (targets - self.num_old).clamp(min=0), reduction="none")
        loss = self.over.mean(self.over.weighted(errors, targets), new)
        student = (logits[:, self.num_old :] / options.kd_temp).log_softmax(1)
        teacher = (guide.detach() / options.kd_temp).log_softmax(1)
        divergence = self.over.mean((teacher.exp() * (teacher - student)).sum(1), new)
        better, usual = self.over.losses(torch.stack([loss, right]), len(targets))
        return options.trans_cls_factor * loss + options.transfer_factor * torch.where(better < usual, divergence, 0)

    def end_task(self, task: Task) -> None:
        if task.index and task.num_new:
            self.network.head.align(task.num_old)


class TaskAgnosticNet(ExpandingNet):
    """DER's network, and for training: a task-agnostic backbone, its projector, and attention that merges both.

    Args:
        backbone: the first task's block.
        agnostic: a second backbone of the same kind.
        side: of the images, by which the number of channels of the last stage is found.
        hidden: features of the projector's hidden layer.
        projected: features that the projector gives.
        heads: of the attention; they share the channels.
    """

    made_anew = ("aux_head", "merged_head", "attention")

    def __init__(
        self, backbone: Backbone, agnostic: nn.Module, side: int, hidden: int, projected: int, heads: int
    ) -> None:
        super().__init__(backbone)
        self.agnostic = agnostic
        with torch.no_grad():
            self.channels = tokens_of_last_stage(agnostic.eval(), torch.zeros(1, 3, side, side))[1].shape[2]
        if self.channels % heads:
            raise UserError(
                f"attn_num_heads: {heads} heads cannot share the {self.channels} channels of the last stage equally; "
                "give a divisor"
            )
        self.projector = nn.Sequential(
            IncrementalHead(self.channels, hidden), nn.ReLU(), IncrementalHead(hidden, projected)
        )
        self.predictor = IncrementalHead(self.channels, self.channels)  # predicts the previous task's agnostic features
        self.attention = MergeAttention(self.channels, heads)
        self.merged_head = IncrementalHead(self.channels)

    def grow_from(self, num_classes: int, num_new: int, share: float) -> None:
        """Grow to ``num_classes`` in total.

        A new block's weights are ``share`` times the previous block's plus 1 - ``share`` times the agnostic ones.
        """
        super().grow(num_classes, num_new + 1)
        self.merged_head = IncrementalHead(self.channels, num_new)
        if len(self.blocks) == 1:
            return
        self.attention.reset()
        with torch.no_grad():
            for new, agnostic in zip(self.blocks[-1].parameters(), self.agnostic.parameters(), strict=True):
                new.mul_(share).add_(agnostic, alpha=1 - share)
        for module in self.blocks[-1].modules():
            if isinstance(module, _BatchNorm):
                module.reset_running_stats()

    def depths(self) -> Mapping[nn.Parameter, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().depths() | layers.depths([self.agnostic])

    def extract_with_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) -> features as :meth:`extract` gives them, and the newest block's last map (B, tokens, C)."""
        old = [block(images) for block in self.blocks[:-1]]
        newest, tokens = tokens_of_last_stage(self.blocks[-1], images)
        return torch.cat([*old, newest], 1), tokens

    def forward(self, images: Tensor) -> Tensor:
        if self.training:  # its batch norms collect statistics like all others
            self.agnostic(images)
        return super().forward(images)


class MergeAttention(nn.Module):
    """Each token of a task's map attends to all tokens of the agnostic map and of its own: (B, tokens, C) each."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.own_norm, self.agnostic_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        names = ("query", "own_key", "agnostic_key", "own_value", "agnostic_value")
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.empty(channels, channels)) for name in names})
        self.reset()

    def reset(self) -> None:
        """New initial weights, on whatever device."""
        for weight in self.weights.values():
            weight.data.copy_(nn.init.xavier_normal_(torch.empty(weight.shape)))
        self.own_norm.reset_parameters()
        self.agnostic_norm.reset_parameters()

    def forward(self, agnostic: Tensor, tokens: Tensor) -> Tensor:
        agnostic, tokens = self.agnostic_norm(agnostic), self.own_norm(tokens)
        keys = torch.cat([self._split(agnostic, "agnostic_key"), self._split(tokens, "own_key")], 2)
        values = torch.cat([self._split(agnostic, "agnostic_value"), self._split(tokens, "own_value")], 2)
        merged = scaled_dot_product_attention(self._split(tokens, "query"), keys, values)
        return merged.transpose(1, 2).flatten(2)

    def _split(self, tokens: Tensor, name: str) -> Tensor:
        """(B, tokens, C) -> (B, heads, tokens, C / heads)."""
        return (tokens @ self.weights[name]).unflatten(2, (self.heads, -1)).transpose(1, 2)
