"""The tokeniser, and tokenised examples."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from pycil_wsc.errors import UserError, first_line
from pycil_wsc.llm.config import TINY, LLMConfig

PAPERS_MODEL = "Llama-3.2-1B"  # the paper's TRACE protocol trains it on raw prompts
PROMPT, ANSWER = "\u2042prompt\u2042", "\u2042answer\u2042"  # placeholders at which a chat template is split
TEMPLATE_DATE = "26 Jul 2024"  # Llama's template contains the date; a fixed date gives the same tokens every day
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # the date in others, such as gpt-oss's
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"


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


def load_tokenizer(config: LLMConfig, texts: Iterable[str]) -> Tokenizer:
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
        tokenizer.pad_token = tokenizer.eos_token  # any token will do: padding is neither learned nor attended to
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokeniser of at most ``vocab_size`` tokens."""
    bpe = ByteLevelBPETokenizer()
    special = [PAD, BOS, EOS]
    bpe.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def frame(tokenizer: Tokenizer, config: LLMConfig) -> Frame:
    """The frame that ``config.chat_template`` selects: that of the chat template, or the raw frame."""
    template = getattr(tokenizer, "chat_template", None)
    wanted = config.chat_template
    if wanted and not template:
        raise UserError(f"llm.chat_template: the tokeniser of '{config.model}' has none; use null or false")
    if wanted or (wanted is None and template and PAPERS_MODEL not in config.model):
        return _chat_frame(tokenizer)
    return raw_frame(tokenizer)


def raw_frame(tokenizer: Tokenizer) -> Frame:
    """BOS, if the tokeniser has one, before the prompt; EOS after the answer."""
    bos = () if tokenizer.bos_token_id is None else (cast(int, tokenizer.bos_token_id),)
    return Frame(bos, (), (cast(int, tokenizer.eos_token_id),))


def _chat_frame(tokenizer: Tokenizer) -> Frame:
    """The template's text around a user's message and the answer to it, tokenised with its special tokens."""

    def rendered(answer: list[dict[str, str]]) -> str:
        messages = [{"role": "user", "content": PROMPT}, *answer]
        options = {"chat_template": template, "tokenize": False, "add_generation_prompt": not answer}
        return cast(str, tokenizer.apply_chat_template(messages, date_string=TEMPLATE_DATE, **options))

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
    tokenizer: Tokenizer, items: Sequence[tuple[str, str]], max_prompt: int, max_answer: int, around: Frame
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


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], max_prompt: int, around: Frame) -> list[list[int]]:
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


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
