"""The language model, loaded and saved: from a folder, from the hub, or with random weights; with or without LoRA."""

import warnings
from pathlib import Path
from typing import TypeAlias, cast

import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from pycil_wsc import seeding
from pycil_wsc.errors import UnusableRun, first_line
from pycil_wsc.files import replaced
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
            raise UnusableRun(
                f"llm.model: '{config.model}' cannot be loaded ({first_line(error)}); give a folder, or a name on the "
                "hub that is reachable or cached, and an llm.attn_implementation that is installed"
            ) from None
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


def add_adapters(model: Model, config: LLMConfig) -> Model:
    """``model`` with LoRA adapters (Hu et al., 2022), which alone are trained."""
    every = config.lora_targets == "all-linear"
    targets = config.lora_targets if every else [name.strip() for name in config.lora_targets.split(",")]
    alpha = cast(int, config.lora_alpha)
    options = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():  # PEFT asks by a name that transformers has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            adapted = get_peft_model(model, options)
    except ValueError as error:
        raise UnusableRun(f"llm.lora_targets: {first_line(error)}") from None
    layers = cast(LoraModel, adapted.base_model).targeted_module_names
    for name in [] if every else targets:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise UnusableRun(f"llm.lora_targets: no layer is called '{name}'")
    return cast(Model, adapted)


def positions(model: Model) -> int | None:
    """The number of positions of a model with a table of position embeddings, such as GPT-2; None for other models."""
    limit = getattr(model.config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
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


def _pretrained(config: LLMConfig) -> Model:
    return AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.float32, attn_implementation=config.attn_implementation
    )


def save_model(folder: Path, tokenizer: Tokenizer, state: dict[str, Tensor], config: LLMConfig) -> None:
    """Write the model with weights ``state`` and its tokeniser to ``folder``, in the published dtype (else fp32).

    Adapters are merged into the weights, so that ``AutoModelForCausalLM.from_pretrained(folder)`` needs nothing else;
    they alone are in ``<folder>/adapter``, for ``AutoPeftModelForCausalLM``, unless their base model is random.
    """
    model = load_model(config, tokenizer)
    model.load_state_dict(state)
    published = None if config.model == TINY else AutoConfig.from_pretrained(config.model).dtype
    with replaced(folder) as partial:
        if config.lora_rank:
            adapted = cast(PeftModel, model)
            if config.model != TINY:
                base = Path(config.model)
                adapted.peft_config["default"].base_model_name_or_path = str(base.resolve() if base.is_dir() else base)
                adapted.save_pretrained(str(partial / "adapter"))
            model = cast(Model, cast(LoraModel, adapted.base_model).merge_and_unload())
        cast(nn.Module, model).to(cast(torch.dtype, published or torch.float32))
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
