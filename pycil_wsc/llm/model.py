"""The language model: from a folder, from the hub, or with random weights; with or without LoRA adapters."""

from typing import TypeAlias, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from pycil_wsc import seeding
from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.llm.adapters import add_adapters
from pycil_wsc.llm.config import TINY, LLMConfig
from pycil_wsc.llm.tokens import Tokenizer

logging.disable_progress_bar()  # runs have their own
Model: TypeAlias = PreTrainedModel  # or a PeftModel, which passes on to it what it lacks


def load_model(config: LLMConfig, tokenizer: Tokenizer) -> Model:
    """The model before the first task, in fp32 on the CPU; only what is trained requires a gradient."""
    with seeding.seeded(config.seed, "weights"):
        try:
            model = (tiny_llama(config, tokenizer) if config.model == TINY else _pretrained(config)).eval()
        except Exception as error:  # damaged files raise many kinds
            raise _load_error(error, config) from None
    known = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > known:
        raise UnusableRun(
            f"llm.model: the tokeniser of '{config.model}' has {len(tokenizer)} tokens, the model {known}; "
            "use the tokeniser that belongs to the model"
        )
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if config.lora_rank:
        with seeding.seeded(config.seed, "adapters"):
            model = add_adapters(model, config)
    return model


def positions(model: Model) -> int | None:
    """The number of positions of a model with a table of position embeddings, such as GPT-2; None for other models."""
    limit, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    # OPT's table has two unused rows
    return limit if any(table.num_embeddings in (limit, limit + 2) for table in tables if limit) else None


def tiny_llama(config: LLMConfig, tokenizer: Tokenizer) -> LlamaForCausalLM:
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


def _pretrained(config: LLMConfig) -> Model:
    return AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.float32, attn_implementation=config.attn_implementation
    )


def _load_error(error: Exception, config: LLMConfig) -> UnusableRun:
    """A one-line error for a model that cannot be loaded."""
    reason = first_line(error)
    if "attn" in reason or "ttention" in reason:
        return UnusableRun(f"llm.attn_implementation: {reason}")
    return UnusableRun(
        f"llm.model: no model at '{config.model}' ({reason}); "
        "give a folder, or a name on the hub that is reachable or cached"
    )
