from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pycil_wsc.keys import key
from pycil_wsc.methods.prompts.l2p import PoolLearner, PoolNet
from pycil_wsc.methods.prompts.prompted import AS_PILOT
from pycil_wsc.networks.tuning.pools import PromptPool, initial
from pycil_wsc.networks.tuning.transformer import KeysAndValues, TunedTransformer
from pycil_wsc.registry import register_learner


class DualNet(PoolNet):
    """A prompt that all images share in the first blocks, and prompts from a pool in the next ones."""

    def __init__(self, backbone: TunedTransformer, options: Any):
        e_blocks = [index for index in options.e_prompt_layer_idx if index < backbone.depth]
        g_blocks = [index for index in options.g_prompt_layer_idx if index < backbone.depth]
        dim, start = backbone.dim, options.prompt_key_init
        shape = (len(e_blocks) * 2 * options.length, dim)  # keys and values of each block
        super().__init__(backbone, PromptPool(options.size, shape, dim, options.top_k, start), options)
        self.general = nn.Parameter(initial((len(g_blocks) * 2, options.g_prompt_length, dim), start))
        self.e_blocks = [index for index in e_blocks if index not in g_blocks]
        self.e_rows = [e_blocks.index(index) for index in self.e_blocks]
        self.g_blocks = g_blocks
        self.per_prompt = (len(e_blocks), 2, options.length)

    def with_prompts(self, images: Tensor, chosen: Tensor) -> Tensor:
        taken = self.prompts.prompts[chosen].unflatten(2, self.per_prompt)  # (B, top_k, blocks, 2, length, dim)
        pairs = taken.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # (blocks, B, 2, top_k x length, dim)
        if self.options.prompts_by_halves:
            pairs = by_halves(pairs)
        prefixes = {index: as_pair(pairs[row]) for index, row in zip(self.e_blocks, self.e_rows)}
        shared = self.general.unflatten(0, (-1, 2))  # (blocks, 2, length, dim)
        prefixes |= {index: as_pair(shared[row : row + 1]) for row, index in enumerate(self.g_blocks)}
        return self.backbone(images, prefixes=prefixes)


def as_pair(prompts: Tensor) -> KeysAndValues:
    """(B, 2, p, dim) -> keys and values."""
    return prompts[:, 0], prompts[:, 1]


def by_halves(pairs: Tensor) -> Tensor:
    """(blocks, B, 2, p, dim): what belongs to images and to keys and values, read in the order of the other."""
    return pairs.transpose(1, 2).reshape(pairs.shape)


@register_learner(
    "dualprompt",
    **AS_PILOT,
    init_epoch=5,
    epochs=5,
    init_lr=0.001,
    lrate=0.001,
    batch_size=24,
)
class DualPrompt(PoolLearner):
    """DualPrompt (Wang et al., ECCV 2022): keys and values before those of the tokens, shared ones and a task's own.

    In training, a task has its own prompts of the pool; in a test each image gets those whose key is nearest. PILOT
    mixes up images with keys and values (``prompts_by_halves``), and lets the images of a test batch vote
    (``batchwise_test``).
    """

    @dataclass(frozen=True)
    class Options(PoolLearner.Options):
        top_k: int = key(1, "prompts that an image gets", low=1)
        use_prompt_mask: bool = key(
            True, "in training, a task has `top_k` prompts of its own, while there are any left"
        )
        shared_prompt_pool: bool = key(True, "a task's own prompts begin as those of the task before")
        g_prompt_length: int = key(5, "keys and values of the prompt that all tasks share", low=1)
        g_prompt_layer_idx: tuple[int, ...] = key((0, 1), "blocks with this prompt, from 0; others are left out", low=0)
        e_prompt_layer_idx: tuple[int, ...] = key((2, 3, 4), "blocks with the prompts of the pool, likewise", low=0)
        prompts_by_halves: bool = key(
            False,
            "as in PILOT: half of a batch gets the pool's keys as keys and as values, the other half its values",
        )

    def build(self) -> DualNet:
        return DualNet(TunedTransformer(self.new_backbone()), self.config.options)
