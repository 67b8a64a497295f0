"""The language model: from a folder, from the hub, or with random weights; with or without LoRA adapters."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from pycil_wsc import seeding
from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.llm.adapters import add_adapters
from pycil_wsc.llm.config import TINY, LLMConfig
from pycil_wsc.llm.tokens import IGNORED, Batch, Example, Packed, collate, pack

logging.disable_progress_bar()  # runs have their own


def load_model(config: LLMConfig, tokenizer: Any, empty: bool = False) -> Any:
    """The model before the first task, in fp32 on the CPU; only what is trained requires a gradient.

    ``empty``: its parameters are on the meta device, to be filled by the caller. This takes no memory and reads only
    the configuration.
    """
    with torch.device("meta") if empty else contextlib.nullcontext():
        with seeding.seeded(config.seed, "weights"):
            try:
                model = tiny_llama(config, tokenizer) if config.model == TINY else _pretrained(config, empty)
            except Exception as error:  # damaged files raise many kinds
                raise _load_error(error, config) from None
        known = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        if len(tokenizer) > known:
            raise UnusableRun(
                f"llm.model: the tokeniser of '{config.model}' has {len(tokenizer)} tokens, the model {known}; "
                "use the tokeniser that belongs to the model"
            )
        if config.packing:
            _check_packing(model, known, empty)
        if config.gradient_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if config.lora_rank:
            with seeding.seeded(config.seed, "adapters"):
                model = add_adapters(model, config)
    return model


def positions(model: Any) -> int | None:
    """The number of positions of a model with a table of position embeddings, such as GPT-2; None for other models."""
    limit, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    # OPT's table has two unused rows
    return limit if any(table.num_embeddings in (limit, limit + 2) for table in tables if limit) else None


def tiny_llama(config: LLMConfig, tokenizer: Any) -> LlamaForCausalLM:
    """A Llama of the configuration's sizes with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            max_position_embeddings=config.max_prompt + max(config.max_answer, config.max_new_tokens),
            tie_word_embeddings=True,
            attn_implementation=config.attn_implementation,  # pyright: ignore[reportCallIssue]
        )
    )


def own_dtype(config: LLMConfig) -> torch.dtype:
    """The dtype of the published weights; fp32 if the model's configuration does not set one."""
    if config.model == TINY:
        return torch.float32
    dtype = AutoConfig.from_pretrained(config.model).dtype
    return (getattr(torch, dtype) if isinstance(dtype, str) else dtype) or torch.float32


def _pretrained(config: LLMConfig, empty: bool) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": config.attn_implementation}
    if empty:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), **options)
        with contextlib.suppress(OSError):  # as from_pretrained, which does without the file too
            model.generation_config = GenerationConfig.from_pretrained(config.model)
        return model
    return AutoModelForCausalLM.from_pretrained(config.model, **options)


def _check_packing(model: Any, tokens: int, empty: bool) -> None:
    """Raise :class:`UnusableRun` unless two packed items have the losses that they have alone.

    They differ where a recurrence goes through the row, or positions are counted from the attention mask. ``tokens``:
    the size of the vocabulary. An ``empty`` model has no losses.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnusableRun(f"llm.packing: {type(model).__name__} does not accept position_ids; use false")
    if empty:
        return
    ids = tuple(tokens * place // 10 for place in range(1, 10))
    items = Example(ids[:5], prompt=1), Example(ids[5:], prompt=1)
    with torch.no_grad(), _evaluated_on_the_cpu(model):
        alone = torch.cat([token_losses(model, collate([item], 0, "cpu")).sum(1) for item in items])
        packed = packed_losses(model, pack(items, "cpu"))
    if not torch.allclose(packed, alone, rtol=1e-4):  # rounding in fp32 is below 1e-5
        raise UnusableRun(f"llm.packing: packed items change each other's losses in {type(model).__name__}; use false")


@contextlib.contextmanager
def _evaluated_on_the_cpu(model: Any) -> Iterator[None]:
    """A context in which ``model`` is in evaluation mode, with attention that a CPU computes."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention not in ("eager", "sdpa"):
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.train(training)
        if attention not in ("eager", "sdpa"):
            model.set_attn_implementation(attention)


def _load_error(error: Exception, config: LLMConfig) -> UnusableRun:
    """A one-line error for a model that cannot be loaded."""
    reason = first_line(error)
    if "attn" in reason or "ttention" in reason:
        return UnusableRun(f"llm.attn_implementation: {reason}")
    return UnusableRun(
        f"llm.model: no model at '{config.model}' ({reason}); "
        "give a folder, or a name on the hub that is reachable or cached"
    )


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of the trained parameters; tied parameters once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy in fp32 of each token from ``batch.first`` on: (B, L - first), 0 for tokens without a label.

    Logits, which take most of the memory, are computed for these tokens only.
    """
    labels = batch.labels[:, batch.first :]
    logits = model(input_ids=batch.ids, logits_to_keep=labels.shape[1] + 1, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").view(
        labels.shape
    )


def packed_losses(model: nn.Module, batch: Packed) -> Tensor:
    """Cross-entropy in fp32, summed over each item's learned tokens: (B,)."""
    places = {"input_ids": batch.ids, "position_ids": batch.positions, "logits_to_keep": batch.predicted_at}
    logits = model(**places, use_cache=False).logits[0].float()
    losses = cross_entropy(logits, batch.labels, reduction="none")
    return losses.new_zeros(len(batch.counts)).index_add(0, batch.owners, losses)
