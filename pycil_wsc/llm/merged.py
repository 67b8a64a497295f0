"""The weights that are merged: the trained parameters, or with LoRA the effective weights of the adapted layers."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pycil_wsc.errors import UnusableRun
from pycil_wsc.llm.adapters import adapted_layers
from pycil_wsc.llm.placing import Replicated


class TrainedWeights:
    """The trained parameters themselves, by name."""

    def __init__(self, placing: Replicated) -> None:
        self.placing = placing

    def read(self) -> dict[str, Tensor]:
        """The current weights: name -> tensor, not copied."""
        return {name: parameter.detach() for name, parameter in self.placing.parameters.items()}

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of the model."""
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
            for name, tensor in self._changed().items():
                tensor.copy_(own[name])

    @property
    def elements(self) -> int:
        """The number of elements, in the whole model."""
        return sum(parameter.numel() for parameter in self.placing.trained.values())

    def _changed(self) -> dict[str, Tensor]:
        return self.read()


class AdaptedWeights(TrainedWeights):
    """The effective weights W + s B A of the layers with adapters, under the names of W.

    The factors A and B cannot be merged separately: a mean of products is not the product of the means. A merge is
    written into W, with B = 0, which is exact whatever its rank. The adapter is then trained from there.
    """

    def __init__(self, placing: Replicated) -> None:
        super().__init__(placing)
        self.layers = {f"{layer.layer}.base_layer.weight": layer for layer in adapted_layers(placing.model)}
        for name, parameter in placing.model.named_parameters(remove_duplicate=False):
            for own, layer in self.layers.items():
                if parameter is layer.weight and name != own:
                    raise UnusableRun(
                        f"llm.lora_targets: '{layer.layer}' shares its weight with '{name}', which a merge would "
                        "change too; leave it out"
                    )

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """The current effective weights: name -> new tensor."""
        local, full = self.placing.local, self.placing.full
        return {
            name: torch.addmm(local(layer.weight), local(layer.up), full(layer.down), alpha=layer.scaling)
            for name, layer in self.layers.items()
        }

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        for name, layer in self.layers.items():
            self.placing.local(layer.weight).copy_(weights[name])
            self.placing.local(layer.up).zero_()

    @property
    def elements(self) -> int:
        return sum(layer.weight.numel() for layer in self.layers.values())

    def _changed(self) -> dict[str, Tensor]:
        weights = {name: self.placing.local(layer.weight) for name, layer in self.layers.items()}
        return weights | {f"{name}.up": self.placing.local(layer.up) for name, layer in self.layers.items()}
