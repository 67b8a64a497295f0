"""The tokeniser, and tokenised examples."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TypeAlias, cast

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from pycil_wsc.errors import UserError, first_line
from pycil_wsc.llm.config import TINY, LLMConfig

PAPERS_MODEL = "Llama-3.2-1B"  # the paper's TRACE protocol trains it on raw prompts
PLACE = "\u2042{}\u2042"  # placeholders, by number, at which the text of a chat template is split
TEMPLATE_DATE = "26 Jul 2024"  # Llama's template contains the date; a fixed date gives the same tokens every day
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # the date in others, such as gpt-oss's
BOS = "<|begin|>"
EOS = "<|end|>"
PAD = "<|pad|>"
Prompt: TypeAlias = str | Sequence[tuple[str, str]]  # a text, or the (role, text) of each turn, the user's last


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
    before, after = _around(tokenizer, ("user",))
    end = _ids_of_template(tokenizer, _texts_around(tokenizer, ("user", "assistant"))[2].strip())
    return Frame(before, after, end or (cast(int, tokenizer.eos_token_id),), chat=True)


def _around(tokenizer: Tokenizer, roles: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of the template's text before each of the messages of these ``roles``, and from the last one on."""
    return [_ids_of_template(tokenizer, text) for text in _texts_around(tokenizer, roles)]


def _texts_around(tokenizer: Tokenizer, roles: Sequence[str]) -> list[str]:
    """The template's text before each of the messages of these ``roles``, and after the last one.

    After a user's message, the template begins the assistant's.
    """
    messages = [{"role": role, "content": PLACE.format(number)} for number, role in enumerate(roles)]
    options = {"tokenize": False, "add_generation_prompt": roles[-1] == "user", "date_string": TEMPLATE_DATE}
    date = datetime.strptime(TEMPLATE_DATE, "%d %b %Y")
    texts = []
    try:
        template = NOW.sub(lambda call: repr(date.strftime(call[2])), tokenizer.get_chat_template())
        rest = cast(str, tokenizer.apply_chat_template(messages, chat_template=template, **options))
        for message in messages:
            before, rest = rest.split(message["content"])
            texts.append(before)
    except Exception as error:  # the template is a program of its own
        raise UserError(
            f"llm.chat_template: the tokeniser's template does not take messages of {', '.join(roles)} "
            f"({first_line(error)}); use other data, or false for items of a single prompt"
        ) from None
    return [*texts, rest]


def _ids_of_template(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def encode(
    tokenizer: Tokenizer, items: Sequence[tuple[Prompt, str]], max_prompt: int, max_answer: int, around: Frame
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


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt], max_prompt: int, around: Frame) -> list[list[int]]:
    """The tokens of each prompt in the frame ``around``. Long prompts lose their beginning.

    A prompt of several turns is framed by the chat template. If it is too long, it loses its earliest turns, up to the
    next one of the user; the system prompt stays, and the last turn loses its beginning only if it is too long alone.
    """
    contents = iter(_ids(tokenizer, [text for prompt in prompts for text in _contents(prompt)]))
    frames: dict[tuple[str, ...], list[tuple[int, ...]]] = {("user",): [around.before, around.after]}
    framed = []
    for prompt in prompts:
        roles = ["user"] if isinstance(prompt, str) else [role for role, _ in prompt]
        if len(roles) > 1 and not around.chat:
            raise UserError(
                "llm.data: an item has messages of several turns, which need a chat template; set llm.chat_template to "
                "true and llm.model to a model that has one, or give prompt and answer"
            )
        framed.append(_framed(tokenizer, roles, [next(contents) for _ in roles], max_prompt, frames))
    if [] in framed:
        raise UserError(
            "llm.data: a prompt is empty, and the tokeniser has no token for the beginning of a text; "
            "give each item a prompt"
        )
    return framed


def _contents(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [content for _, content in prompt]


def _framed(
    tokenizer: Tokenizer,
    roles: list[str],
    contents: list[list[int]],
    max_prompt: int,
    frames: dict[tuple[str, ...], list[tuple[int, ...]]],
) -> list[int]:
    """At most ``max_prompt`` tokens of messages. ``frames``: {roles: tokens around such messages}, which may grow."""
    while True:
        key = tuple(roles)
        if key not in frames:
            frames[key] = _around(tokenizer, key)
        pieces = frames[key]
        room = max_prompt - sum(map(len, pieces)) - sum(map(len, contents[:-1]))
        first = int(roles[0] == "system")  # the earliest turn that may be left out
        if room >= len(contents[-1]) or first == len(roles) - 1:
            break
        following = roles.index("user", first + 1)
        del roles[first:following], contents[first:following]
    if room < 1:
        raise UserError(f"llm.max_prompt: {max_prompt} is too short for a prompt in the chat template; increase it")
    *earlier, last = contents
    kept = [*earlier, last[max(0, len(last) - room) :]]
    inside = [(*before, *content) for before, content in zip(pieces[:-1], kept, strict=True)]
    return [*chain.from_iterable(inside), *pieces[-1]]


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
