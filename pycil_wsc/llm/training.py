"""Trains the model: optimiser steps, consolidation, and the merge after each task."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycil_wsc import seeding
from pycil_wsc.consolidation import Average, Blend, Revert, WeightSpaceConsolidation, moment_score
from pycil_wsc.consolidation.epochs import warmup_in_steps
from pycil_wsc.consolidation.functional import Betas
from pycil_wsc.engine.precision import resolved_precision
from pycil_wsc.engine.processes import Processes
from pycil_wsc.errors import UnusableRun
from pycil_wsc.llm.config import Consolidation, LLMConfig
from pycil_wsc.llm.corpus import Epoch
from pycil_wsc.llm.merged import AdaptedWeights, TrainedWeights
from pycil_wsc.llm.merging import MERGES, Merge
from pycil_wsc.llm.model import load_model, packed_losses, token_losses
from pycil_wsc.llm.placing import Replicated, Sharded
from pycil_wsc.llm.tokens import Example, collate, micro_batches, pack


class Training:
    """Call ``begin_task``, ``begin_epoch`` and ``step`` for each epoch, then ``end_task``; test within ``tested``."""

    def __init__(self, config: LLMConfig, tokenizer: Any, processes: Processes, device: torch.device) -> None:
        self.config, self.device, self.pad = config, device, tokenizer.pad_token_id
        self.precision = _precision(config, device)
        placing = Sharded if config.shard and processes.count > 1 else Replicated
        load = partial(load_model, config, tokenizer)
        self.placing = placing(load, processes, device, self.precision)
        self.model, self.parameters = self.placing.model, self.placing.parameters
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=_betas(config),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.weights, self.merge = self._merging()
        self.names = {name for name, _ in self.model.named_parameters()}
        self.wsc: WeightSpaceConsolidation | None = None
        # tokens: without padding; answers: tokens with a label
        self.counts = {"steps": 0, "tokens": 0, "padding": 0, "answers": 0}

    def begin_task(self, index: int, epochs: Sequence[Epoch]) -> None:
        """Start task ``index``, which has these ``epochs``; the consolidation stores the current weights."""
        self.covered = sum(steps_of(epoch, self.config) for epoch in epochs if self._covered(epoch))
        wanted = self.config.method == "wsc" and self.covered and (index or self.config.wsc.first_task)
        self.wsc = self._new_consolidation() if wanted else None

    def begin_epoch(self, epoch: Epoch) -> None:
        """Start an epoch; the consolidation follows the epochs that it covers."""
        if self.wsc and self._covered(epoch):
            self.wsc.detach()
            if not (self.wsc.warmup_steps or self.wsc.steps):  # the average starts from these weights
                self.wsc = self._new_consolidation()
            self.wsc.attach(self.optimizer)

    def step(self, examples: Sequence[Example]) -> Tensor:
        """One optimiser step; returns this process's part of the mean loss, on the device."""
        self.model.train()
        groups = micro_batches(examples, self.config.micro_tokens, self.config.padding, self.config.packing)
        labels, loss = sum(len(e) - e.prompt for e in examples), torch.zeros((), device=self.device)
        *others, last = self.placing.share(groups)
        address = "dropout", self.counts["steps"], self.placing.processes.rank
        with seeding.seeded(self.config.seed, *address, device=self.device):
            with self.placing.accumulating():
                for group, factor in others:
                    loss += self._backward(group, factor, len(examples), labels)
            loss += self._backward(*last, len(examples), labels)
        self.placing.collect_gradients()
        self._clip()
        self.optimizer.step()
        self.placing.clear()
        self._count(groups, labels)
        return loss

    def end_task(self) -> None:
        """Set the weights to the average or to an online merge; add them to any other merge."""
        if self.wsc:
            self.wsc.finish()
            self.wsc.detach()
            self.wsc = None
        if self.merge:
            self.merge.update(self.weights.read())
            if self.merge.online:
                self.weights.write(self.merge.result())

    def tested(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights to test: for a merge that is not online, the merged weights."""
        if not self.merge or self.merge.online:
            return contextlib.nullcontext()
        return self.weights.replaced(self.merge.result())

    @property
    def sharded(self) -> bool:
        return self.placing.peers is not None

    # ---- saving and resuming ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, of the whole model; tensors are not copied."""
        parts = {"wsc": self.wsc and self.wsc.state_dict(), "merge": self.merge and self.merge.state_dict()}
        model = {name: parameter.detach() for name, parameter in self.parameters.items()}
        state = {"model": model, "optimizer": self.optimizer.state_dict(), **parts}
        return self._by_parameter(self.placing.whole, state) | {"counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any], index: int, epochs: Sequence[Epoch]) -> None:
        """Resume from ``state``, saved in or after task ``index`` of ``epochs``; its tensors may be in a file."""
        self.counts = state["counts"]
        parts = {name: part for name, part in state.items() if name != "counts"}
        parts = self._by_parameter(self.placing.part, parts)
        if self.merge and parts["merge"]:
            self.merge.load_state_dict(parts["merge"])
            if self.merge.online and self.merge.count:
                self.weights.write(self.merge.result())  # the merged weights below the adapters
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parts["model"][name])
        self.optimizer.load_state_dict(parts["optimizer"])
        if parts["wsc"]:
            self.begin_task(index, epochs)
            assert self.wsc
            # of a sharded model, the shapes are those of this process's rows
            self.wsc.load_state_dict(parts["wsc"] | {"shapes": self.wsc.state_dict()["shapes"]})

    def _by_parameter(self, change: Callable[[str, Any], Tensor], state: Any, path: tuple[Any, ...] = ()) -> Any:
        """Replace each tensor of a parameter, found by key or optimiser index, by ``change(name, tensor)``."""
        if isinstance(state, dict):
            return {key: self._by_parameter(change, value, (*path, key)) for key, value in state.items()}
        if hasattr(state, "get_shape") or isinstance(state, Tensor) and state.dim():
            numbered = list(self.parameters)
            names = [numbered[key] if isinstance(key, int) else str(key).removeprefix("running.") for key in path]
            (name,) = (name for name in names if name in self.names)
            return change(name, state)
        return state

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _new_consolidation(self) -> WeightSpaceConsolidation:
        return _consolidation(self.config.wsc, _betas(self.config), self.placing, self.covered)

    def _covered(self, epoch: Epoch) -> bool:
        return epoch.replay or self.config.wsc.covers == "all"

    def _backward(self, group: Sequence[Example], factor: float, examples: int, labels: int) -> Tensor | float:
        """Add ``factor`` times the gradients of a group's share in the mean of ``examples`` items or ``labels`` tokens.

        Returns the share.
        """
        losses, counts = self._losses(group)
        loss = (losses / counts).sum() / examples if self.config.loss == "item" else losses.sum() / labels
        (factor * loss).backward()
        return loss.detach() if factor else 0.0

    def _losses(self, group: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """The loss of each item, summed over its learned tokens, and their number: (B,) each."""
        if self.config.packing:
            packed = pack(group, self.device)
            with self.placing.autocast():
                return self.placing.losses(packed_losses, packed), packed.counts
        batch = collate(group, self.pad, self.device)
        with self.placing.autocast():
            return self.placing.losses(token_losses, batch).sum(1), batch.counts

    def _clip(self) -> None:
        """Like torch's ``clip_grad_norm_``, over all parts of the model."""
        if self.config.clip is None:
            return
        factor = (self.config.clip / (self.placing.square_norm().sqrt() + 1e-6)).clamp(max=1.0)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def _count(self, groups: Sequence[Sequence[Example]], labels: int) -> None:
        tokens = sum(len(example) for group in groups for example in group)
        area = tokens if self.config.packing else sum(len(group) * len(group[0]) for group in groups)
        for name, more in {"steps": 1, "tokens": tokens, "padding": area - tokens, "answers": labels}.items():
            self.counts[name] += more

    def _merging(self) -> tuple[TrainedWeights, Merge | None]:
        """The weights that the method merges, and the running merge; None for a method without merging."""
        config, peers = self.config, self.placing.peers
        options: dict[str, dict[str, Any]] = {
            "avg_offline": {},
            "avg_online": {"decay": config.ema_decay if config.average == "ema" else None},
            "slerp": {"weight": config.slerp_weight, "space": config.slerp_on, "total": peers and peers.sum},
            "task_arithmetic": {"scale": config.task_arithmetic_scale},
            "magmax": {"scale": config.magmax_scale},
        }
        if config.method not in options:
            return TrainedWeights(self.placing), None
        weights = AdaptedWeights(self.placing) if config.lora_rank else TrainedWeights(self.placing)
        return weights, MERGES[config.method](weights.read(), **options[config.method])


def _precision(config: LLMConfig, device: torch.device) -> str:
    """``"fp32"`` or ``"bf16"``. On a CPU, ``auto`` is fp32, which is faster for models of a feasible size."""
    if config.precision == "auto" and device.type == "cpu":
        return "fp32"
    return resolved_precision(config.precision, device)


def steps_of(epoch: Epoch, config: LLMConfig) -> int:
    """The number of optimiser steps of an epoch."""
    return -(-len(epoch.examples) // config.batch_size)


def _betas(config: LLMConfig) -> Betas:
    first, second = config.betas
    return first, second


def _consolidation(options: Consolidation, betas: Betas, placing: Replicated, steps: int) -> WeightSpaceConsolidation:
    """A consolidation over ``steps`` optimiser steps, with the current weights as those before the task."""
    momentum = options.reset_momentum
    resets = {"blend": Blend(options.blend, momentum=momentum), "revert": Revert(momentum=momentum), "none": None}
    average = Average(options.average_every, options.average_start, options.average_count, options.average_last)
    consolidation = WeightSpaceConsolidation(
        placing.parameters.items(),
        warmup_steps=warmup_in_steps(options.warmup, steps, resets=options.reset != "none"),
        retain=options.retain,
        importance=moment_score(betas if options.moments == "own" else None, source=options.moments),
        reset=resets[options.reset],
        average=average if options.average else None,
        rank_scope=options.rank_scope,
        peers=placing.peers,
    )
    try:
        consolidation.check_fits(steps)
    except ValueError as error:
        raise UnusableRun(f"wsc: a task is too short ({error}); change the keys 'wsc.*'") from None
    return consolidation
