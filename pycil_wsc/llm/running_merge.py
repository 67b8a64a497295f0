"""The merging methods of language models."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from pycil_wsc.consolidation.model_merging import (
    MagMaxMerge,
    Merge,
    ModelSoup,
    OnlineAverage,
    Slerp,
    State,
    TaskArithmetic,
)
from pycil_wsc.consolidation.ranking import Peers
from pycil_wsc.consolidation.sharded import gathered, like, local, part_of, peers_of
from pycil_wsc.llm.config import MERGES, LLMConfig
from pycil_wsc.llm.model import Model
from pycil_wsc.plugins.huggingface import drop_gathered


def new_merge(config: LLMConfig, start: State, peers: Peers | None) -> Merge:
    """The merge of a method of :data:`MERGES`, of weights that the ``peers`` hold parts of, from ``start`` on."""
    if config.method == "avg_online":
        return OnlineAverage(start, decay=None)
    if config.method == "slerp":
        return Slerp(start, weight=0.5, space="weights", total=peers.sum if peers else None)
    if config.method == "task_arithmetic":
        return TaskArithmetic(start, scale=config.task_arithmetic_scale)
    return MagMaxMerge(start, scale=config.magmax_scale) if config.method == "magmax" else ModelSoup(start)


class RunningMerge:
    """The running merge of a model's parameters, of which each process reads, merges and writes its own part.

    ``merge``: None for a method without merging.
    """

    def __init__(self, config: LLMConfig, model: Model) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        merges = config.method in MERGES
        self.merge = new_merge(config, self._weights(), peers_of(self.parameters)) if merges else None

    def end_task(self) -> None:
        """Add the weights after a task to the merge; an online merge becomes the weights."""
        if self.merge:
            self.merge.update(self._weights())
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
        weights = {name: weight.clone() for name, weight in self._weights().items()}
        self._write(self.merge.result())
        try:
            yield
        finally:
            self._write(weights)

    def state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """The state of the merge, of whole tensors; ``keep=False`` in processes that do not save it."""
        state = self.merge.state_dict() if self.merge else {}
        return gathered({name: like(part, self._merged(name, part)) for name, part in state.items()}, keep)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.merge:
            parts = {}
            for name, value in state.items():
                parameter = self._merged(name, value)
                parts[name] = part_of(value, parameter).to(parameter.device)
            self.merge.load_state_dict(parts)

    def _merged(self, name: str, otherwise: Tensor) -> Tensor:
        """The parameter that an entry of the merge's state is of; for a count or the like, ``otherwise``."""
        return self.parameters.get(name.removeprefix("running."), otherwise)

    def _weights(self) -> dict[str, Tensor]:
        return {name: local(parameter.detach()) for name, parameter in self.parameters.items()}

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        drop_gathered(self.model)
        for name, weight in self._weights().items():
            weight.copy_(weights[name])
