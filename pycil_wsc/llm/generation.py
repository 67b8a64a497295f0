"""Generates answers to prompts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from pycil_wsc import seeding
from pycil_wsc.llm.config import LLMConfig


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: LLMConfig,
    device: torch.device,
    address: Sequence[str | int] = (),
    end: Sequence[int] = (),
    answered: Callable[[int], None] = lambda count: None,
    together: bool = False,
) -> list[str]:
    """The text that follows each of ``prompts`` (lists of tokens), up to the end-of-text token or ``max_new_tokens``.

    Decoding is greedy or, if ``config.temperature`` is not 0, sampled with a seed that depends on ``address``. The
    model's own generation settings are ignored, except the end-of-text tokens: with a repetition penalty, for example,
    decoding would not be greedy.

    Args:
        end: the tokens that end an answer. Generation stops at the last of them and at end-of-text tokens.
        answered: called with the number of answers after each batch.
        together: for a sharded model: every process continues until all have their answers. All processes need the same
            number of prompts.
    """
    model.eval()
    stop = stop_tokens(model, tokenizer) | set(end[-1:])
    options = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=sorted(stop),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        do_sample=config.temperature > 0,
        **({"temperature": config.temperature, "top_k": 0, "top_p": 1.0} if config.temperature else {}),
    )
    order, texts = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True), [""] * len(prompts)
    for start in range(0, len(order), config.eval_batch):
        batch = order[start : start + config.eval_batch]
        ids, mask = left_padded([prompts[i] for i in batch], tokenizer.pad_token_id, device)
        seeded = seeding.seeded(config.seed, "sampling", *address, start, device=device)
        casts = contextlib.nullcontext() if together else casts_kept(model)  # FSDP has its own casts
        with casts, seeded, no_settings(model):
            generated = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=options, synced_gpus=together
            )
        for i, row in zip(batch, generated[:, ids.shape[1] :].tolist()):
            texts[i] = tokenizer.decode(until(row, stop), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answered(start + len(batch))
    return texts


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokeniser's end-of-text token, which is learned, and the model's own (such as a chat model's end of turn)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])}


@contextlib.contextmanager
def no_settings(model: Any) -> Iterator[None]:
    """A context without the model's own generation settings, which ``generate`` would take as defaults."""
    model = getattr(model, "get_base_model", lambda: model)()  # below adapters
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def casts_kept(model: Any) -> Iterator[None]:
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


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, L) ids and attention mask; every prompt ends at the last position."""
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad)
    mask = torch.zeros((len(prompts), length), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def until(ids: Sequence[int], stop: set[int]) -> Sequence[int]:
    """The tokens before the first of ``stop``."""
    return ids[: next((place for place, token in enumerate(ids) if token in stop), len(ids))]
