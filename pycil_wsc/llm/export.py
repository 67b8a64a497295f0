"""Saves a trained model as a folder for transformers and PEFT."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from pycil_wsc.files import replaced
from pycil_wsc.llm.config import TINY, LLMConfig
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.tokens import Tokenizer


def save_model(folder: Path, tokenizer: Tokenizer, state: dict[str, Tensor], config: LLMConfig) -> None:
    """Write the model with weights ``state`` and its tokeniser to ``folder``, in the dtype of the published model.

    Adapters are merged into the weights, so that ``AutoModelForCausalLM.from_pretrained(folder)`` needs nothing else;
    they alone are in ``<folder>/adapter``, for ``AutoPeftModelForCausalLM``, unless their base model is random.
    """
    model = load_model(config, tokenizer)
    model.load_state_dict(state)
    with replaced(folder) as partial:
        if config.lora_rank:
            if config.model != TINY:
                base = Path(config.model)
                model.peft_config["default"].base_model_name_or_path = str(base.resolve() if base.is_dir() else base)
                model.save_pretrained(str(partial / "adapter"))
            model = model.merge_and_unload()
        model.to(own_dtype(config)).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def own_dtype(config: LLMConfig) -> torch.dtype:
    """The dtype of the published weights; fp32 if the model's configuration does not set one."""
    if config.model == TINY:
        return torch.float32
    return AutoConfig.from_pretrained(config.model).dtype or torch.float32
