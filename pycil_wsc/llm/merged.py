"""The weights that are merged: the trained parameters, or with LoRA the effective weights of the adapted layers.

Of sharded parameters, each process reads, merges and writes its own rows.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pycil_wsc.consolidation.sharded import gathered, is_sharded, like, local, part_of, peers_of
from pycil_wsc.errors import UnusableRun
from pycil_wsc.llm.adapters import adapted_layers
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.merging import MERGES, Merge
from pycil_wsc.plugins.huggingface import drop_gathered


class TrainedWeights:
    """The trained parameters themselves, by name."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.merged = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def read(self) -> dict[str, Tensor]:
        """The current weights: name -> tensor, not copied."""
        return {name: local(parameter.detach()) for name, parameter in self.merged.items()}

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of the model."""
        drop_gathered(self.model)
        for name, tensor in self._changed().items():
            tensor.copy_(weights[name])

    @contextlib.contextmanager
    def replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the model has ``weights``; its own are restored exactly on exit."""
        own = {name: tensor.clone() for name, tensor in self._changed().items()}
        self.write(weights)
        try:
            yield
        finally:
            drop_gathered(self.model)
            for name, tensor in self._changed().items():
                tensor.copy_(own[name])

    @property
    def elements(self) -> int:
        """The number of elements, in the whole model."""
        return sum(parameter.numel() for parameter in self.merged.values())

    def trained(self) -> list[Tensor]:
        """The trained parameters; of sharded ones, this process's rows."""
        return [local(parameter.detach()) for parameter in self.model.parameters() if parameter.requires_grad]

    def _changed(self) -> dict[str, Tensor]:
        return self.read()


class AdaptedWeights(TrainedWeights):
    """The effective weights W + s B A of the layers with adapters, under the names of W.

    The factors A and B cannot be merged separately: a mean of products is not the product of the means. A merge is
    written into W, with B = 0, which is exact whatever its rank. The adapter is then trained from there.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.layers = {f"{layer.layer}.base_layer.weight": layer for layer in adapted_layers(model)}
        self.merged = {name: layer.weight for name, layer in self.layers.items()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for own, layer in self.layers.items():
                if parameter is layer.weight and name != own:
                    raise UnusableRun(
                        f"llm.lora_targets: '{layer.layer}' shares its weight with '{name}', which a merge would "
                        "change too; leave it out"
                    )

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """The current effective weights: name -> new tensor."""
        weights = {}
        for name, layer in self.layers.items():
            down: Any = layer.down.detach()
            down = down.full_tensor() if is_sharded(down) else down
            weights[name] = torch.addmm(
                local(layer.weight.detach()), local(layer.up.detach()), down, alpha=layer.scaling
            )
        return weights

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        drop_gathered(self.model)
        for name, layer in self.layers.items():
            local(layer.weight.detach()).copy_(weights[name])
            local(layer.up.detach()).zero_()

    def _changed(self) -> dict[str, Tensor]:
        weights = {name: local(layer.weight.detach()) for name, layer in self.layers.items()}
        return weights | {f"{name}.up": local(layer.up.detach()) for name, layer in self.layers.items()}


class Merging:
    """The running merge of a run, if its method has one."""

    def __init__(self, config: LLMConfig, model: Any) -> None:
        self.weights, self.merge = self._made(config, model)

    def _made(self, config: LLMConfig, model: Any) -> tuple[TrainedWeights, Merge | None]:
        if config.method not in MERGES:
            return TrainedWeights(model), None
        weights = AdaptedWeights(model) if config.lora_rank else TrainedWeights(model)
        peers = peers_of(weights.merged)
        options: dict[str, dict[str, Any]] = {
            "avg_offline": {},
            "avg_online": {"decay": config.ema_decay if config.average == "ema" else None},
            "slerp": {"weight": config.slerp_weight, "space": config.slerp_on, "total": peers and peers.sum},
            "task_arithmetic": {"scale": config.task_arithmetic_scale},
            "magmax": {"scale": config.magmax_scale},
        }
        return weights, MERGES[config.method](weights.read(), **options[config.method])

    def end_task(self) -> None:
        """Add the weights after a task to the merge; an online merge becomes the weights."""
        if self.merge:
            self.merge.update(self.weights.read())
            if self.merge.online:
                self.weights.write(self.merge.result())

    def tested(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights to test: for a merge that is not online, the merged weights."""
        if not self.merge or self.merge.online:
            return contextlib.nullcontext()
        return self.weights.replaced(self.merge.result())

    def state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """The state of the merge, of whole tensors; ``keep=False`` in processes that do not save it."""
        state = self.merge.state_dict() if self.merge else {}
        named = {f"running.{name}": tensor for name, tensor in self.weights.merged.items()}
        whole = {name: like(part, named[name]) if name in named else part for name, part in state.items()}
        return gathered(whole, keep)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from :meth:`state_dict`; with adapters, an online merge is written into the weights below them."""
        if not self.merge:
            return
        named = {f"running.{name}": tensor for name, tensor in self.weights.merged.items()}
        self.merge.load_state_dict(
            {name: part_of(value, named[name]) if name in named else value for name, value in state.items()}
        )
        if self.merge.online and self.merge.count and isinstance(self.weights, AdaptedWeights):
            merged = self.merge.result()
            for name, layer in self.weights.layers.items():
                local(layer.weight.detach()).copy_(merged[name])
