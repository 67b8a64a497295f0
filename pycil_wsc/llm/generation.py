"""What the model answers to prompts."""

import contextlib

import torch
from transformers import GenerationConfig

from pycil_wsc import seeding


@torch.no_grad()
def answers(
    model,
    tokenizer,
    prompts,
    config,
    device,
    autocast=contextlib.nullcontext,
    address=(),
    tell=lambda count: None,
    together=False,
):
    """The text that follows each of ``prompts`` (lists of tokens), up to the end-of-text token or ``max_new_tokens``.

    Greedy, or sampled where ``config.temperature`` is not 0, then random by ``address``. ``tell`` is called with the number of
    answers after each batch. ``together``: the model is sharded, and every process goes on until all have their answers; they need as many
    prompts each.
    """
    model.eval()
    stop = stop_tokens(model, tokenizer)
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
        with autocast(), sampling(device, config.seed, "sampling", *address, start):
            generated = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=options, synced_gpus=together
            )
        for i, row in zip(batch, generated[:, ids.shape[1] :].tolist()):
            texts[i] = tokenizer.decode(until(row, stop), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        tell(start + len(batch))
    return texts


def stop_tokens(model, tokenizer):
    """The end-of-text token that was learned, and those that the model knows beside it (a chat model's end of a turn)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])}


def left_padded(prompts, pad, device):
    """(B, L) ids and attention mask; every prompt ends at the last place."""
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad)
    mask = torch.zeros((len(prompts), length), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def until(ids, stop):
    """The tokens before the first of ``stop``."""
    return ids[: next((place for place, token in enumerate(ids) if token in stop), len(ids))]


@contextlib.contextmanager
def sampling(device, seed, *address):
    """Within, torch's global generators are seeded by address; after, they are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeding.derived_seed(seed, *address))
        yield
