"""Generates answers to prompts."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from pycil_wsc import seeding
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.model import Model
from pycil_wsc.llm.tokens import Tokenizer


@torch.no_grad()
def answers(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    config: LLMConfig,
    device: torch.device,
    address: Sequence[str | int] = (),
    answered: Callable[[int], None] = lambda count: None,
    together: bool = False,
) -> list[str]:
    """The text that follows each of ``prompts`` (lists of tokens), up to the end-of-text token or ``max_new_tokens``.

    Decoding is greedy or, if ``config.temperature`` is not 0, sampled with a seed that depends on ``address``. It ends
    where :func:`stops_alone` said. ``answered`` is called with the number of answers after each batch. ``together``:
    the model is sharded, so every process, with equally many prompts, continues until all have their answers.
    """
    model.eval()
    stop = cast(list[int], cast(GenerationConfig, model.generation_config).eos_token_id)
    options = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        do_sample=config.temperature > 0,
        **({"temperature": config.temperature, "top_k": 0, "top_p": 1.0} if config.temperature else {}),
    )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    texts = [""] * len(prompts)
    for start in range(0, len(order), config.eval_batch):
        batch = order[start : start + config.eval_batch]
        inputs = tokenizer.pad({"input_ids": [prompts[i] for i in batch]}, padding_side="left", return_tensors="pt")
        seeded = seeding.seeded(config.seed, "sampling", *address, start, device=device)
        casts = contextlib.nullcontext() if together else casts_kept(model)  # FSDP has its own casts
        with casts, seeded:
            generate = cast(Callable[..., Tensor], model.generate)
            generated = generate(**inputs.to(device), generation_config=options, synced_gpus=together)
        new = generated[:, inputs["input_ids"].shape[1] :].tolist()
        ended = [list(itertools.takewhile(lambda token: token not in stop, row)) for row in new]
        decoded = tokenizer.batch_decode(ended, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for i, text in zip(batch, decoded, strict=True):
            texts[i] = text
        answered(start + len(batch))
    return texts


def stops_alone(model: Model, tokenizer: Tokenizer, end: Sequence[int] = ()) -> None:
    """Of the model's own generation settings keep only where to stop: ``generate`` would take all as defaults.

    It stops at the tokeniser's end-of-text token, which is learned, the model's own (such as a chat model's end of
    turn), and the last token of ``end``.
    """
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    stops = {cast(int, tokenizer.eos_token_id), *ends, *end[-1:]}
    model.generation_config = GenerationConfig(eos_token_id=sorted(stops))


@contextlib.contextmanager
def casts_kept(model: Model) -> Iterator[None]:
    """A context in which ``torch.autocast`` casts each frozen weight once, not for every token.

    It keeps the casts of parameters that require a gradient alone, even under ``torch.no_grad()``.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype == torch.float32]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
