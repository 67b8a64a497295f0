"""From texts to tokens: the tokeniser, what is learned of an item, and batches of items of like length."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pycil_wsc import seeding
from pycil_wsc.errors import UserError
from pycil_wsc.llm.config import TINY

IGNORED = -100  # a label that is not learned, as torch's cross_entropy has it
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
PAD_NAMES = (
    "<|finetune_right_pad_id|>",
    "<pad>",
    "<|endoftext|>",
)  # of models whose tokeniser declares none: Llama-3.1 and later have the first


@dataclass(frozen=True)
class Example:
    """An item as tokens, beginning to end: BOS, prompt, answer, EOS. The first ``prompt`` of them are not learned."""

    ids: tuple[int, ...]
    prompt: int

    def __len__(self):
        return len(self.ids)


def load_tokenizer(config, texts):
    """The tokeniser of ``config.model``, with all that training needs; for the tiny model one trained on ``texts``."""
    if config.model == TINY:
        return train_tokenizer(texts, config.vocab_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise UserError(
            f"llm.model: no tokeniser at '{config.model}' ({_first_line(error)}); give a folder, or a name on the hub that is reachable or cached"
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"llm.model: the tokeniser of '{config.model}' has no token for the end of a text; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next(
            (name for name in PAD_NAMES if name in known), tokenizer.eos_token
        )  # padding is masked by place, whatever its token
    return tokenizer


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE tokeniser of at most ``vocab_size`` tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def encode(tokenizer, items, max_prompt, max_answer):
    """An :class:`Example` of each (prompt, answer) pair.

    Prompt and answer are tokenised apart, so that no token spans both: training then sees what a test sees. A long prompt loses
    its beginning but keeps BOS, a long answer its end but keeps EOS. What looks like a special token in a text is text.
    """
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in items], max_prompt)
    answers = _ids(tokenizer, [answer for _, answer in items])
    return [
        Example((*prompt, *answer[: max_answer - 1], tokenizer.eos_token_id), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def encode_prompts(tokenizer, prompts, max_prompt):
    """The tokens that the model sees of each prompt: BOS, if the tokeniser has one, and the prompt's end."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = max_prompt - len(bos)
    return [bos + ids[max(0, len(ids) - room) :] for ids in _ids(tokenizer, prompts)]


def _ids(tokenizer, texts):
    return (
        tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if texts
        else []
    )


def _first_line(error):
    return str(error).strip().splitlines()[0]


# ---- batches -----------------------------------------------------------------------------------------------------------


def shuffled(count, batch_size, seed, *address):
    """The items of each optimiser step of an epoch: lists of at most ``batch_size`` of ``range(count)``. Random by address."""
    order = torch.randperm(count, generator=seeding.generator(seed, "order", *address)).tolist()
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def micro_batches(examples, tokens, padding):
    """The examples of an optimiser step in groups of like length: lists, each for one forward pass.

    A group has at most ``tokens`` tokens, padding included, of which at most the share ``padding`` is padding; a longer example
    is a group of its own.
    """
    groups = []
    for example in sorted(examples, key=len, reverse=True):
        if groups and _fits(groups[-1], example, tokens, padding):
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def _fits(group, example, tokens, padding):
    area = len(group[0]) * (len(group) + 1)
    return area <= tokens and area - sum(map(len, group)) - len(example) <= padding * area


@dataclass(frozen=True)
class Batch:
    """A group as tensors, padded on the right: ``ids`` and ``labels`` (B, L), ``counts`` of labels (B,). None is before ``first``.

    Padding comes after all that counts, and attention is causal, so it needs no mask.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    first: int


def collate(examples, pad, device):
    length = max(map(len, examples))
    ids = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example.ids)
        labels[row, example.prompt : len(example)] = ids[row, example.prompt : len(example)]
    counts = torch.tensor([len(example) - example.prompt for example in examples])
    return Batch(ids.to(device), labels.to(device), counts.to(device), min(example.prompt for example in examples))
