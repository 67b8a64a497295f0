"""LoRA adapters (Hu et al., 2022): a trained update s B A of rank r is added to a frozen weight W."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from pycil_wsc.errors import UnusableRun, UserError, first_line
from pycil_wsc.llm.config import LLMConfig

NAME = "default"  # PEFT's name of a single adapter
PREFIX = "base_model.model."  # of the names in a PeftModel


@dataclass(frozen=True)
class Adapted:
    """A linear layer with an adapter: ``weight`` (out, in), ``down`` A (r, in), ``up`` B (out, r), ``scaling`` s."""

    layer: str
    weight: nn.Parameter
    down: nn.Parameter
    up: nn.Parameter
    scaling: float


def add_adapters(model: Any, config: LLMConfig) -> nn.Module:
    """``model``, a transformers model, with adapters, which alone are trained: a ``PeftModel``."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise UserError("llm.lora_rank: adapters need peft; pip install peft, or use 0") from None
    targets: Any = config.lora_targets
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]
    options = LoraConfig(
        r=config.lora_rank, lora_alpha=cast(int, config.lora_alpha), target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():  # PEFT asks by a name that transformers has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            adapted = get_peft_model(model, options)
    except ValueError as error:
        raise UnusableRun(f"llm.lora_targets: {first_line(error)}") from None
    layers = [f".{layer.layer}" for layer in adapted_layers(adapted)]
    for name in targets if isinstance(targets, list) else []:
        if not any(layer.endswith(f".{name}") for layer in layers):
            raise UnusableRun(f"llm.lora_targets: no layer is called '{name}'")
    return adapted


def adapted_layers(model: nn.Module) -> list[Adapted]:
    """The layers of ``model`` that have an adapter. Raises :class:`UnusableRun` if one is not linear."""
    from peft.tuners.lora import Linear, LoraLayer

    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module, Linear) or module.fan_in_fan_out:
            raise UnusableRun(
                f"llm.lora_targets: '{name}' is not a linear layer, so its adapter cannot be merged; name linear layers"
            )
        layer: Any = module
        up, down = (factor[NAME].weight for factor in (layer.lora_B, layer.lora_A))
        layers.append(Adapted(name, layer.get_base_layer().weight, down, up, layer.scaling[NAME]))
    return layers


def merged_state(state: dict[str, Tensor], layers: Iterable[Adapted]) -> dict[str, Tensor]:
    """The state dict of the model without adapters: W + s B A replaces each adapted W."""
    merged = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
    for each in layers:
        up, down = (state[f"{each.layer}.{part}.{NAME}.weight"] for part in ("lora_B", "lora_A"))
        name = f"{each.layer.removeprefix(PREFIX)}.weight"
        merged[name] = merged[name] + each.scaling * (up @ down)
    return merged


def save_adapters(folder: Path, model: Any, state: dict[str, Tensor], base: str) -> None:
    """Write the adapters in PEFT's format, to be loaded onto the model ``base``: a folder or a name on the hub."""
    model.peft_config[NAME].base_model_name_or_path = base
    model.save_pretrained(folder, state_dict=state)
