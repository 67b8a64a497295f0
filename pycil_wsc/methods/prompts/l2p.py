from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.prompts.prompted import AS_PILOT, PromptedLearner, PromptedNet
from pycil_wsc.networks.heads import NormalHead
from pycil_wsc.networks.tuning.pools import PromptPool
from pycil_wsc.networks.tuning.transformer import TunedTransformer
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch


class PoolNet(PromptedNet):
    """Prompts from a pool (L2P, DualPrompt)."""

    prompts: PromptPool  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, backbone: TunedTransformer, pool: PromptPool, options: Any):
        super().__init__(backbone, NormalHead, pool)
        self.options = options

    def queries(self, images: Tensor) -> Tensor:
        kind = self.options.embedding_key
        if kind == "cls":
            return super().queries(images)
        with torch.no_grad():
            vit = self.backbone.original or self.backbone.vit
            patches = vit.patch_embed(images).flatten(1, -2)
        mean, largest = patches.mean(1), patches.amax(1)
        return {"mean": mean, "max": largest, "mean_max": largest + 2 * mean}[kind]

    def prompted(self, images: Tensor, queries: Tensor) -> Tensor:
        similarity = self.prompts.similarity(queries)
        votes = (lambda counts: counts) if self.options.batchwise_test else None
        return self.with_prompts(images, self.prompts.chosen(similarity, votes))

    def with_prompts(self, images: Tensor, chosen: Tensor) -> Tensor:
        """(B, 3, H, W) images and their prompts, int64 (B, top_k) -> (B, d) features."""
        raise NotImplementedError


class L2PNet(PoolNet):
    """Prompts are tokens beside those of the image, from the first block on."""

    def with_prompts(self, images: Tensor, chosen: Tensor) -> Tensor:
        backbone = self.backbone
        prompts = self.prompts.prompts[chosen].flatten(1, 2)  # (B, top_k x length, dim)
        count = prompts.shape[1]
        tokens = backbone.tokens(images, prompts=prompts + backbone.query_position())
        kind, first = self.options.head_type, backbone.vit.num_prefix_tokens
        if kind == "token":
            return backbone.pooled(tokens, count)
        start = first if kind == "prompt" else 0
        stop = tokens.shape[1] if kind == "gap" else first + count
        return backbone.vit.fc_norm(tokens[:, start:stop].mean(1))


class PoolLearner(PromptedLearner):
    """The training of L2P and DualPrompt."""

    @dataclass(frozen=True)
    class Options:
        """The pool of prompts; names and values are PILOT's."""

        size: int = key(10, "prompts in the pool", low=1)
        length: int = key(5, "tokens of a prompt", low=1)
        top_k: int = key(5, "prompts that an image gets", low=1)
        prompt_key_init: str = key("uniform", "initial prompts and keys", choices=("uniform", "zero"))
        embedding_key: str = key(
            "cls",
            "the query: features of the pre-trained model (`cls`), or the `mean`, the `max`imum, or both (`mean_max`), "
            "of the embedded patches",
            choices=("cls", "mean", "max", "mean_max"),
        )
        use_prompt_mask: bool = key(
            False, "in training, a task has `top_k` prompts of its own, while there are any left"
        )
        shared_prompt_pool: bool = key(False, "a task's own prompts begin as those of the task before")
        shared_prompt_key: bool = key(False, "a task's own keys begin as those of the task before")
        batchwise_prompt: bool = key(
            True, "in training, all images of a batch get the prompts that most of them choose"
        )
        batchwise_test: bool = key(
            False, "so do test images, whose predictions then depend on each other, as those of PILOT do"
        )
        pull_constraint: bool = key(True, "pull the keys of the chosen prompts towards the queries")
        pull_constraint_coeff: float = key(0.1, "weight of `pull_constraint`", low=0)

    network: PoolNet  # pyright: ignore[reportIncompatibleVariableOverride]

    class Plan(PromptedLearner.Plan):
        def check(self) -> str | None:
            options = self.config.options
            if options.top_k > options.size:
                return f"top_k: {options.top_k} prompts cannot be chosen from {options.size}; raise size"
            return super().check()

    def grow(self, task: Task) -> None:
        super().grow(task)
        options = self.config.options
        if task.index:
            self.network.prompts.pass_on(task.index, options.shared_prompt_pool, options.shared_prompt_key)
        self.task_of_class = torch.from_numpy(task_of_class(self, task)).to(self.device)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options, pool = self.config.options, self.network.prompts
        similarity = pool.similarity(self.queries(batch))
        chosen = pool.chosen(similarity, self.processes.sum if options.batchwise_prompt else None)
        if options.use_prompt_mask:
            chosen = pool.of_tasks(self.task_of_class[batch.targets], chosen)
        logits = self.network.classify(self.network.with_prompts(batch.images, chosen))
        loss = self.error(logits, batch)
        if options.pull_constraint:
            pull = similarity.float().gather(1, chosen).sum(1).mean()
            loss = loss - options.pull_constraint_coeff * pull
        return loss, logits


def task_of_class(learner: PromptedLearner, task: Task) -> np.ndarray:
    """The task that each class seen came with: int64 (classes,)."""
    starts = [earlier.num_old for earlier in learner.manager.tasks[: task.index + 1]]
    return np.searchsorted(np.asarray(starts), np.arange(task.num_seen), side="right") - 1


@register_learner(
    "l2p",
    **AS_PILOT,
    init_epoch=5,
    epochs=5,
    init_lr=0.001875,
    lrate=0.001875,
    batch_size=16,
)
class L2P(PoolLearner):
    """L2P (Wang et al., CVPR 2022): an image gets the prompts of a pool whose keys are nearest to its features.

    The prompts are tokens beside those of the image, in a frozen transformer. In training, the images of a batch vote
    which prompts they all get, as in PILOT; in a test each image has its own, while PILOT's vote there, too
    (``batchwise_test``).
    """

    @dataclass(frozen=True)
    class Options(PoolLearner.Options):
        head_type: str = key(
            "prompt",
            "the tokens whose mean is classified: `prompt`, `token` (the class token), `token+prompt`, or `gap` (all)",
            choices=("prompt", "token", "token+prompt", "gap"),
        )

    def build(self) -> L2PNet:
        options = self.config.options
        backbone = TunedTransformer(self.new_backbone())
        dim = backbone.dim
        start = options.prompt_key_init
        pool = PromptPool(options.size, (options.length, dim), dim, options.top_k, start)
        return L2PNet(backbone, pool, options)
