"""The merging methods of language models: what they merge, and how many models each keeps in memory."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pycil_wsc.consolidation.merging import MagMax, Merge, ModelSoup, OnlineAverage, Slerp, State, TaskArithmetic
from pycil_wsc.consolidation.ranking import Peers
from pycil_wsc.consolidation.sharded import gathered, like, local, part_of, peers_of, whole
from pycil_wsc.llm.adapters import mergeable_layers, parts
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.model import Model
from pycil_wsc.plugins.huggingface import drop_gathered

MERGES: dict[str, type[Merge]] = {  # by `llm.method`
    "avg_offline": ModelSoup,
    "avg_online": OnlineAverage,
    "slerp": Slerp,
    "task_arithmetic": TaskArithmetic,
    "magmax": MagMax,
}


def new_merge(config: LLMConfig, start: State, peers: Peers | None) -> Merge:
    """The merge of a method of :data:`MERGES`, of weights that the ``peers`` hold parts of, from ``start`` on."""
    if config.method == "avg_online":
        return OnlineAverage(start, decay=None)
    if config.method == "slerp":
        return Slerp(start, weight=0.5, space="weights", total=peers and peers.sum)
    if config.method == "task_arithmetic":
        return TaskArithmetic(start, scale=config.task_arithmetic_scale)
    return MagMax(start, scale=config.magmax_scale) if config.method == "magmax" else ModelSoup(start)


class Merging:
    """The running merge of the trained parameters, or with adapters of the effective weights W + s B A of their layers.

    The factors A and B cannot be merged separately: a mean of products is not the product of the means. A merge is
    written into W, with B = 0, which is exact whatever its rank. The adapter is then trained from there. Of sharded
    parameters, each process reads, merges and writes its own rows.

    ``parameters``: what is merged, or W; ``merge``: None for a method without merging.
    """

    def __init__(self, config: LLMConfig, model: Model) -> None:
        merges = config.method in MERGES
        self.model = model
        self.layers = mergeable_layers(model) if merges and config.lora_rank else {}
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: parts(layer).weight for name, layer in self.layers.items()} or trained
        self.merge = new_merge(config, self._read(), peers_of(self.parameters)) if merges else None

    def end_task(self) -> None:
        """Add the weights after a task to the merge; an online merge becomes the weights."""
        if self.merge:
            self.merge.update(self._read())
            if self.merge.online:
                self._write(self.merge.result())

    @contextlib.contextmanager
    def tested(self) -> Iterator[None]:
        """A context in which the model has the weights to test: for a merge that is not online, the merged weights.

        The model's own are restored exactly on exit.
        """
        if not self.merge or self.merge.online:
            yield
            return
        changed = [*self.parameters.values(), *(parts(layer).up for layer in self.layers.values())]
        own = [(local(parameter.detach()), local(parameter.detach()).clone()) for parameter in changed]
        self._write(self.merge.result())
        try:
            yield
        finally:
            drop_gathered(self.model)
            for tensor, value in own:
                tensor.copy_(value)

    def state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """The state of the merge, of whole tensors; ``keep=False`` in processes that do not save it."""
        state = self.merge.state_dict() if self.merge else {}
        return gathered({name: like(part, self._merged(name, part)) for name, part in state.items()}, keep)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from :meth:`state_dict`; with adapters, an online merge is written into the weights below them."""
        if not self.merge:
            return
        self.merge.load_state_dict({name: part_of(value, self._merged(name, value)) for name, value in state.items()})
        if self.merge.online and self.merge.count:
            merged = self.merge.result()
            for name in self.layers:
                local(self.parameters[name].detach()).copy_(merged[name])

    def _merged(self, name: str, otherwise: Tensor) -> Tensor:
        """The parameter that an entry of the merge's state is of; for a count or the like, ``otherwise``."""
        return self.parameters.get(name.removeprefix("running."), otherwise)

    @torch.no_grad()
    def _read(self) -> dict[str, Tensor]:
        """The current weights by name; with adapters, new tensors."""
        weights = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        for name, layer in self.layers.items():
            _, down, up, scaling = parts(layer)
            weights[name] = torch.addmm(weights[name], local(up), whole(down), alpha=scaling)
        return weights

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        drop_gathered(self.model)
        for name, parameter in self.parameters.items():
            local(parameter.detach()).copy_(weights[name])
        for layer in self.layers.values():
            local(parts(layer).up.detach()).zero_()


class ResidentModels(NamedTuple):
    """Models in memory at once, in units of one model.

    ``paper``: as counted by the paper's relative VRAM (T for offline methods); ``streamed``: as needed by this package.
    """

    paper: float
    streamed: float


def models_resident(
    method: str,
    tasks: int,
    trained: float = 1.0,
    merged: float = 1.0,
    own_moments: bool = False,
) -> ResidentModels:
    """:class:`ResidentModels` over ``tasks`` tasks: the model in training, the running merge, theta_0 if it is kept.

    WSC keeps the weights before the task and, after the reset, the average instead; with ``own_moments`` two moments
    too. ``trained`` and ``merged``: the shares of the parameters that are
    trained, which other copies of the model hold, and merged, which the running merge holds. They are below 1 with
    adapters.
    """
    if method not in MERGES:
        copies = trained if method == "wsc" else 0
        return ResidentModels(1 + copies, 1 + copies + 2 * trained * own_moments)
    cls = MERGES[method]
    paper = 1 if cls.online else tasks - 1
    streamed = 2 if cls.task_vectors else 1
    return ResidentModels(1 + paper * trained, 1 + streamed * merged)
