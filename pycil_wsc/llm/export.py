"""Saves a trained model as a folder for transformers and PEFT."""

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from pycil_wsc.errors import UserError
from pycil_wsc.llm.adapters import adapted_layers, merged_state, save_adapters
from pycil_wsc.llm.config import TINY, LLMConfig
from pycil_wsc.llm.model import load_model, own_dtype
from pycil_wsc.llm.training import TaskTrainer


def save_model(
    folder: Path, model: Any, tokenizer: Any, state: dict[str, Tensor], config: LLMConfig, with_adapters: bool
) -> None:
    """Write the model with weights ``state`` and its tokeniser to ``folder``, in the dtype of the published model.

    Adapters are merged into the weights (W + s B A), so that ``AutoModelForCausalLM.from_pretrained(folder)`` needs
    nothing else. ``with_adapters``: also write the adapters alone to ``<folder>/adapter``, for
    ``AutoPeftModelForCausalLM``. They refer to their base model; if its weights are random, it is written beside
    ``folder``, as ``base``.
    """
    if config.lora_rank:
        if with_adapters:
            save_adapters(folder / "adapter", model, state, _base(folder, tokenizer, config))
        state = merged_state(state, adapted_layers(model))
        model = model.get_base_model()
    _save(folder, model, tokenizer, state, own_dtype(config))


def whole_state(trainer: TaskTrainer) -> dict[str, Tensor]:
    """The state dict of the whole model, with tied weights as one tensor; complete in the first process."""
    state, first = trainer.accelerator.get_state_dict(trainer.model), {}
    names = {name: id(parameter) for name, parameter in trainer.model.named_parameters(remove_duplicate=False)}
    return {name: first.setdefault(names.get(name, name), tensor) for name, tensor in state.items()}


def _base(folder: Path, tokenizer: Any, config: LLMConfig) -> str:
    """The folder, or name on the hub, of the model without adapters."""
    if config.model == TINY:
        base = folder.parent / "base"
        if not (base / "config.json").exists():
            plain = load_model(replace(config, lora_rank=0), tokenizer)
            _save(base, plain, tokenizer, plain.state_dict(), torch.float32)
        return str(base.resolve())
    return str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model


def _save(folder: Path, model: Any, tokenizer: Any, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    with torch.device("meta"):  # a model in the dtype to save, which takes no memory
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)
    empty.generation_config = model.generation_config
    cast: dict[int, Tensor] = {}  # tied weights remain one tensor, which is written once
    for tensor in state.values():
        cast.setdefault(tensor.data_ptr(), tensor.to(dtype) if tensor.is_floating_point() else tensor)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        empty.save_pretrained(partial, state_dict={name: cast[tensor.data_ptr()] for name, tensor in state.items()})
        tokenizer.save_pretrained(partial)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):  # marks the folder complete
            os.replace(path, folder / path.name)
        partial.rmdir()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot be written ({error}); free space or choose another folder with --out"
        ) from None
