"""The tokeniser, tokenised examples, and batches of examples of similar length."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pycil_wsc import seeding
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.llm.config import TINY

IGNORED = -100  # label of a token without a loss: the default ignore_index of torch's cross_entropy
PAPERS_MODEL = "Llama-3.2-1B"  # the paper's TRACE protocol trains it on raw prompts
PROMPT, ANSWER = "\u2042prompt\u2042", "\u2042answer\u2042"  # placeholders at which a chat template is split
TEMPLATE_DATE = "26 Jul 2024"  # Llama's template contains the date; a fixed date gives the same tokens every day
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # the date in others, such as gpt-oss's
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
# padding tokens to use if the tokeniser declares none; Llama 3.1 and later have the first
PAD_NAMES = (
    "<|finetune_right_pad_id|>",
    "<pad>",
    "<|endoftext|>",
)


@dataclass(frozen=True)
class Example:
    """An item as tokens: the framed prompt, the answer, its end. The first ``prompt`` tokens have no loss."""

    ids: tuple[int, ...]
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Frame:
    """The tokens around prompt and answer: ``before`` prompt ``after`` answer ``end``. ``chat``: of a chat template."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: tuple[int, ...]
    chat: bool = False


def load_tokenizer(config: Any, texts: Iterable[str]) -> Any:
    """The tokeniser of ``config.model``, with end and padding tokens; for the tiny model, one trained on ``texts``."""
    if config.model == TINY:
        return train_tokenizer(texts, config.vocab_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    except Exception as error:  # damaged files raise many kinds
        raise UserError(
            f"llm.model: no tokeniser at '{config.model}' ({first_line(error)}); "
            "give a folder, or a name on the hub that is reachable or cached"
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"llm.model: the tokeniser of '{config.model}' has no token for the end of a text; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        known = tokenizer.get_vocab()
        # any token will do, since padding is masked by position
        tokenizer.pad_token = next((name for name in PAD_NAMES if name in known), tokenizer.eos_token)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
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


def frame(tokenizer: Any, config: Any) -> Frame:
    """The frame that ``config.chat_template`` selects: that of the chat template, or the raw frame."""
    template = getattr(tokenizer, "chat_template", None)
    wanted = config.chat_template
    if wanted and not template:
        raise UserError(f"llm.chat_template: the tokeniser of '{config.model}' has none; use null or false")
    if wanted or (wanted is None and template and PAPERS_MODEL not in config.model):
        return _chat_frame(tokenizer)
    return raw_frame(tokenizer)


def raw_frame(tokenizer: Any) -> Frame:
    """BOS, if the tokeniser has one, before the prompt; EOS after the answer."""
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return Frame(bos, (), (tokenizer.eos_token_id,))


def _chat_frame(tokenizer: Any) -> Frame:
    """The template's text around a user's message and the answer to it, tokenised with its special tokens."""

    def rendered(answer: list[dict[str, str]]) -> str:
        messages = [{"role": "user", "content": PROMPT}, *answer]
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=not answer,
            date_string=TEMPLATE_DATE,
        )

    try:
        date = datetime.strptime(TEMPLATE_DATE, "%d %b %Y")
        template = NOW.sub(lambda call: repr(date.strftime(call[2])), tokenizer.get_chat_template())
        before, after = rendered([]).split(PROMPT)
        end = rendered([{"role": "assistant", "content": ANSWER}]).split(ANSWER)[1].strip()
    except Exception as error:  # the template is a program of its own
        raise UserError(
            "llm.chat_template: the tokeniser's template does not take a single turn of user and assistant "
            f"({first_line(error)}); use false"
        ) from None
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] if text else [] for text in (before, after, end)]
    if not pieces[2]:
        pieces[2] = [tokenizer.eos_token_id]
    return Frame(*map(tuple, pieces), chat=True)


def encode(
    tokenizer: Any, items: Sequence[tuple[str, str]], max_prompt: int, max_answer: int, around: Frame
) -> list[Example]:
    """An :class:`Example` of each (prompt, answer) pair in the frame ``around``.

    Prompt and answer are tokenised separately, so that no token spans both, as in a test. Long prompts lose their
    beginning, long answers their end; the frame is never cut. The name of a special token within a text is tokenised as
    text.
    """
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in items], max_prompt, around)
    answers = _ids(tokenizer, [answer for _, answer in items])
    room = max_answer - len(around.end)
    if room < 1:
        raise UserError(f"llm.max_answer: {max_answer} is too short for an answer and its end; increase it")
    return [
        Example((*prompt, *answer[:room], *around.end), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def encode_prompts(tokenizer: Any, prompts: Sequence[str], max_prompt: int, around: Frame) -> list[list[int]]:
    """The tokens of each prompt in the frame ``around``. Long prompts lose their beginning."""
    room = max_prompt - len(around.before) - len(around.after)
    if room < 1:
        raise UserError(f"llm.max_prompt: {max_prompt} is too short for a prompt in the chat template; increase it")
    framed = [[*around.before, *ids[max(0, len(ids) - room) :], *around.after] for ids in _ids(tokenizer, prompts)]
    if [] in framed:
        raise UserError(
            "llm.data: a prompt is empty, and the tokeniser has no token for the beginning of a text; "
            "give each item a prompt"
        )
    return framed


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


# ---- batches -------------------------------------------------------------------------------------------------------


def shuffled(count: int, batch_size: int, seed: int, *address: str | int) -> list[list[int]]:
    """The items of each optimiser step of an epoch: lists of at most ``batch_size``, in random order.

    Together they are ``range(count)``. The order depends on ``seed`` and ``address``.
    """
    order = torch.randperm(count, generator=seeding.generator(seed, "order", *address)).tolist()
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def micro_batches(
    examples: Iterable[Example], tokens: int, padding: float, packing: bool = False
) -> list[list[Example]]:
    """The examples of an optimiser step in groups of similar length, one for each forward pass.

    A group has at most ``tokens`` tokens, including padding, which is at most the share ``padding`` of them; a longer
    example is a group of its own. With ``packing`` there is no padding.
    """
    groups: list[list[Example]] = []
    for example in sorted(examples, key=len, reverse=True):
        if groups and (_packs if packing else _fits)(groups[-1], example, tokens, padding):
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def _fits(group: list[Example], example: Example, tokens: int, padding: float) -> bool:
    area = len(group[0]) * (len(group) + 1)
    return area <= tokens and area - sum(map(len, group)) - len(example) <= padding * area


def _packs(group: list[Example], example: Example, tokens: int, padding: float) -> bool:
    return sum(map(len, group)) + len(example) <= tokens


@dataclass(frozen=True)
class Batch:
    """A group as tensors, padded on the right: ``ids`` and ``labels`` (B, L), ``counts`` of labels (B,).

    No label is before position ``first``. Padding is on the right and attention is causal, so no mask is needed.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    first: int


def collate(examples: Sequence[Example], pad: int, device: torch.device | str) -> Batch:
    """A group as a :class:`Batch` on ``device``."""
    length = max(map(len, examples))
    ids = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example.ids)
        labels[row, example.prompt : len(example)] = ids[row, example.prompt : len(example)]
    counts = torch.tensor([len(example) - example.prompt for example in examples])
    ids, labels, counts = (tensor.to(device, non_blocking=True) for tensor in (ids, labels, counts))
    return Batch(ids, labels, counts, min(example.prompt for example in examples))


@dataclass(frozen=True)
class Packed:
    """A group as one row without padding: ``ids`` and ``positions`` (1, L), which restart at 0 with each item.

    From positions that restart, transformers infers that items do not attend to each other. Recurrent layers and
    positions counted from a mask ignore them; ``load_model`` refuses such models. The learned tokens are ``labels``
    (N,), predicted at the indices ``predicted_at`` (N,) of the row; ``owners`` (N,) are their items, ``counts`` (B,)
    their numbers per item.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    predicted_at: torch.Tensor
    owners: torch.Tensor
    counts: torch.Tensor


def pack(examples: Sequence[Example], device: torch.device | str) -> Packed:
    """A group as a :class:`Packed` on ``device``."""
    ids = torch.tensor([token for example in examples for token in example.ids])
    positions = torch.cat([torch.arange(len(example)) for example in examples])
    prompts = torch.tensor([example.prompt for example in examples])
    lengths = torch.tensor([len(example) for example in examples])
    owners = torch.repeat_interleave(torch.arange(len(examples)), lengths)
    (learned,) = torch.nonzero(positions >= prompts[owners], as_tuple=True)
    tensors = (ids[None], positions[None], ids[learned], learned - 1, owners[learned], lengths - prompts)
    return Packed(*(tensor.to(device, non_blocking=True) for tensor in tensors))
