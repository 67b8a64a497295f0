"""Saves a trained model as a folder for transformers and PEFT."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from pycil_wsc.files import replaced
from pycil_wsc.llm.adapters import NAME, adapted_layers, merged_state
from pycil_wsc.llm.config import TINY, LLMConfig
from pycil_wsc.llm.model import Model, load_model, own_dtype
from pycil_wsc.llm.tokens import Tokenizer
from pycil_wsc.llm.training import TaskTrainer

if TYPE_CHECKING:
    from peft import PeftModel


def save_model(
    folder: Path, model: Model, tokenizer: Tokenizer, state: dict[str, Tensor], config: LLMConfig, with_adapters: bool
) -> None:
    """Write the model with weights ``state`` and its tokeniser to ``folder``, in the dtype of the published model.

    Adapters are merged into the weights (W + s B A), so that ``AutoModelForCausalLM.from_pretrained(folder)`` needs
    nothing else. ``with_adapters``: also write the adapters alone to ``<folder>/adapter``, for
    ``AutoPeftModelForCausalLM``. They refer to their base model; if its weights are random, it is written beside
    ``folder``, as ``base``.
    """
    with replaced(folder) as partial:
        if config.lora_rank:
            adapted = cast("PeftModel", model)
            if with_adapters:
                adapted.peft_config[NAME].base_model_name_or_path = _base(folder, tokenizer, config)
                adapted.save_pretrained(str(partial / "adapter"), state_dict=state)
            state = merged_state(state, adapted_layers(model))
            model = cast(Model, adapted.get_base_model())
        _save(partial, model, tokenizer, state, own_dtype(config))


def whole_state(trainer: TaskTrainer) -> dict[str, Tensor]:
    """The state dict of the whole model, with tied weights as one tensor; complete in the first process."""
    state, first = trainer.accelerator.get_state_dict(trainer.model), {}
    names = {name: id(parameter) for name, parameter in trainer.model.named_parameters(remove_duplicate=False)}
    return {name: first.setdefault(names.get(name, name), tensor) for name, tensor in state.items()}


def _base(folder: Path, tokenizer: Tokenizer, config: LLMConfig) -> str:
    """The folder, or name on the hub, of the model without adapters."""
    if config.model == TINY:
        base = folder.parent / "base"
        if not (base / "config.json").exists():
            plain = load_model(replace(config, lora_rank=0), tokenizer)
            with replaced(base) as partial:
                _save(partial, plain, tokenizer, plain.state_dict(), torch.float32)
        return str(base.resolve())
    return str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model


def _save(folder: Path, model: Model, tokenizer: Tokenizer, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    with torch.device("meta"):  # a model in the dtype to save, which takes no memory
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)
    empty.generation_config = model.generation_config
    written: dict[int, Tensor] = {}  # tied weights remain one tensor, which is written once
    for tensor in state.values():
        written.setdefault(tensor.data_ptr(), tensor.to(dtype) if tensor.is_floating_point() else tensor)
    try:
        empty.save_pretrained(folder, state_dict={name: written[tensor.data_ptr()] for name, tensor in state.items()})
    except SafetensorError as error:  # of the operating system, such as a full disk
        raise OSError(str(error)) from None
    tokenizer.save_pretrained(folder)
