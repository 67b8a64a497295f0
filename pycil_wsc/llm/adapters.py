"""LoRA adapters (Hu et al., 2022): a trained update s B A of rank r is added to a frozen weight W."""

import warnings
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor, nn

from pycil_wsc.errors import UnusableRun, UserError, first_line
from pycil_wsc.llm.config import LLMConfig

if TYPE_CHECKING:
    from peft.tuners.lora import Linear
    from transformers import PreTrainedModel

NAME = "default"  # PEFT's name of a single adapter
PREFIX = "base_model.model."  # of the names in a PeftModel


class Parts(NamedTuple):
    """``weight`` W (out, in), ``down`` A (r, in), ``up`` B (out, r) and ``scaling`` s of a layer with an adapter."""

    weight: Tensor
    down: Tensor
    up: Tensor
    scaling: float


def add_adapters(model: "PreTrainedModel", config: LLMConfig) -> "PreTrainedModel":
    """``model`` with adapters, which alone are trained: a ``PeftModel``, which passes on what it lacks."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise UserError("llm.lora_rank: adapters need peft; pip install peft, or use 0") from None
    targets = [name.strip() for name in config.lora_targets.split(",")]
    every = targets == ["all-linear"]
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=cast(int, config.lora_alpha),
        target_modules="all-linear" if every else targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # PEFT asks by a name that transformers has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            adapted = cast("PreTrainedModel", get_peft_model(model, options))
    except ValueError as error:
        raise UnusableRun(f"llm.lora_targets: {first_line(error)}") from None
    layers = adapted_layers(adapted)
    for name in [] if every else targets:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise UnusableRun(f"llm.lora_targets: no layer is called '{name}'")
    return adapted


def adapted_layers(model: nn.Module) -> "dict[str, Linear]":
    """The layers of ``model`` that have an adapter, by name. Raises :class:`UnusableRun` if one is not linear."""
    from peft.tuners.lora import Linear, LoraLayer

    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module, Linear) or module.fan_in_fan_out:
            raise UnusableRun(
                f"llm.lora_targets: '{name}' is not a linear layer, so its adapter cannot be merged; name linear layers"
            )
        layers[name] = module
    return layers


def parts(layer: "Linear") -> Parts:
    up, down = (cast(nn.Linear, factor[NAME]).weight for factor in (layer.lora_B, layer.lora_A))
    return Parts(cast(nn.Linear, layer.get_base_layer()).weight, down, up, layer.scaling[NAME])


def mergeable_layers(model: nn.Module) -> "dict[str, Linear]":
    """:func:`adapted_layers` by the names of their weights, which a merge may change: no other layer has them."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model).items()}
    own = {id(parts(layer).weight): name for name, layer in layers.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if own.get(id(parameter), name) != name:
            layer = own[id(parameter)].removesuffix(".base_layer.weight")
            raise UnusableRun(
                f"llm.lora_targets: '{layer}' shares its weight with '{name}', which a merge would change too; "
                "leave it out"
            )
    return layers


def merged_state(state: dict[str, Tensor], layers: "dict[str, Linear]") -> dict[str, Tensor]:
    """The state dict of the model without adapters: W + s B A replaces each adapted W."""
    merged = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
    for layer, module in layers.items():
        up, down = (state[f"{layer}.{part}.{NAME}.weight"] for part in ("lora_B", "lora_A"))
        name = f"{layer.removeprefix(PREFIX)}.weight"
        merged[name] = merged[name] + module.scaling[NAME] * (up @ down)
    return merged
