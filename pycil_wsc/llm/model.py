"""The language model: from a folder, from the hub, or with random weights; whole or with LoRA's adapters."""

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from pycil_wsc import seeding
from pycil_wsc.errors import UserError
from pycil_wsc.llm.config import TINY
from pycil_wsc.llm.tokens import IGNORED

logging.disable_progress_bar()  # runs have their own


def load_model(config, tokenizer):
    """The model before the first task, in fp32 on the CPU; only what is trained requires a gradient."""
    with seeding.seeded(config.seed, "weights"):
        model = tiny_llama(config, tokenizer) if config.model == TINY else _pretrained(config.model)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError(
            f"llm.model: the tokeniser of '{config.model}' has {len(tokenizer)} tokens, the model {model.get_input_embeddings().num_embeddings}; they do not belong together"
        )
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if config.lora_rank:
        with seeding.seeded(config.seed, "adapters"):
            model = with_adapters(model, config)
    return model


def tiny_llama(config, tokenizer):
    """A Llama of the configuration's sizes with random weights."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
    }
    sizes |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "vocab_size": len(tokenizer)}
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    longest = config.max_prompt + max(config.max_answer, config.max_new_tokens)
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes, **special, max_position_embeddings=longest, tie_word_embeddings=True, attn_implementation="sdpa"
        )
    )


def _pretrained(name):
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"llm.model: no model at '{name}' ({reason}); give a folder, or a name on the hub that is reachable or cached"
        ) from None


def with_adapters(model, config):
    """``model`` with LoRA's adapters, which alone are trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise UserError("llm.lora_rank: adapters need peft; pip install peft, or use 0") from None
    targets = config.lora_targets if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    try:
        return get_peft_model(
            model,
            LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"),
        )
    except ValueError as error:
        raise UserError(f"llm.lora_targets: {str(error).splitlines()[0]}") from None


def trained_parameters(model):
    """{name: parameter} of what is trained; a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def token_losses(model, batch):
    """Cross-entropy in fp32 of each token from ``batch.first`` on: (B, L - first), 0 where nothing is learned.

    Only there logits are computed: they are what takes most memory.
    """
    labels = batch.labels[:, batch.first :]
    logits = model(input_ids=batch.ids, logits_to_keep=labels.shape[1] + 1, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").view(
        labels.shape
    )
