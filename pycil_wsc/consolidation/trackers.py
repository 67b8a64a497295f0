"""Trackers follow the steps of a task and compute scores at the reset, for example from moments of the gradients."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from pycil_wsc.consolidation.functional import Betas, drift, update_moments_
from pycil_wsc.consolidation.ranking import Scores
from pycil_wsc.consolidation.sharded import like, local, part_of

State = dict[str, Any]  # tensors and plain values, nested
Params = Mapping[str, Tensor]
QUANTISED = ("torchao",)  # packages whose optimisers keep moments in 8 or 4 bits
RENAMED = ("bitsandbytes",)  # packages whose optimisers have other names for them
OTHERWISE = "use torch.optim.Adam or AdamW, or importance=moment_score(), which tracks moments of its own"


class MomentRule(Protocol):
    """Scores from the first and second moments of ``step`` gradients, as :func:`~.functional.moment_product`."""

    def __call__(self, first: list[Tensor], second: list[Tensor], step: float, betas: Betas) -> list[Tensor]: ...


class Tracker:
    """Follows one task's optimiser steps and scores the elements of ``params``, {name: parameter}, at the reset.

    This base class only records which parameters have had a gradient. Its scores mean nothing: they are for a reset
    that keeps no element. ``of_gradients``: whether scores are moments of gradients, to explain those that are not
    finite.
    """

    of_gradients = False

    def __init__(self, params: Params):
        self.params = params
        self.with_gradient: set[str] = set()

    def check(self, optimizer: Optimizer, steps: int) -> None:
        """Raise ValueError if scores cannot be computed from ``optimizer``, ``steps`` steps into the task."""

    def follow(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        """Called after each step. ``skipped``: None, or a tensor that is not 0 if a ``GradScaler`` skipped the step."""
        self._gradients(skipped)

    def moments_dropped(self, steps: int) -> None:
        """Called when the optimiser's state is dropped, ``steps`` steps into the task."""

    def scores(self, optimizer: Optimizer, steps: int, previous: Params) -> Mapping[str, Scores]:
        """{name: scores} of the parameters that have had a gradient; ``previous``: the weights before the task."""
        return {name: local(self.params[name]) for name in self._names()}

    @property
    def nbytes(self) -> int:
        """Bytes held for the scores, without the weights before the task."""
        return 0

    def state_dict(self) -> State:
        return {"with_gradient": sorted(self.with_gradient)}

    def load_state_dict(self, state: State) -> None:
        self.with_gradient = set(state["with_gradient"])

    def _names(self):
        return [name for name in self.params if name in self.with_gradient]

    def _gradients(self, skipped):
        """{name: gradient or None}; adds the names with a gradient to ``with_gradient``."""
        grads = {name: None if p.grad is None else local(p.grad) for name, p in self.params.items()}
        present = [name for name, grad in grads.items() if grad is not None]
        if not present:
            raise RuntimeError(
                "missing gradients: no parameter has one after optimizer.step(); "
                "call backward() before it and zero_grad() after it"
            )
        new = [name for name in present if name not in self.with_gradient]
        if new:
            self._add_names(new, grads, skipped)
        return grads

    def _add_names(self, names, grads, skipped):
        for name in names:
            if grads[name].layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of '{name}' is sparse: make it dense (for an embedding, sparse=False)"
                )
        if skipped is None or not skipped.item():  # synchronises, for new names and under a GradScaler only
            self.with_gradient.update(names)


class DriftTracker(Tracker):
    """Scores by the distance from the weights before the task; holds no tensors."""

    def scores(self, optimizer: Optimizer, steps: int, previous: Params) -> Mapping[str, Scores]:
        return {name: BlockScores(drift, local(self.params[name]), previous[name]) for name in self._names()}


class FunctionTracker(Tracker):
    """Scores by a function ({name: parameter}, {name: weights before the task}) -> {name: scores}."""

    def __init__(self, params: Params, function: Callable[[dict, dict], Mapping[str, Tensor]]):
        super().__init__(params)
        self.function = function

    def scores(self, optimizer: Optimizer, steps: int, previous: Params) -> Mapping[str, Scores]:
        names = self._names()
        params = {name: local(self.params[name]) for name in names}
        scores = self.function(params, {name: previous[name] for name in names})
        for name, param in params.items():
            if name not in scores or scores[name].shape != param.shape:
                raise ValueError(f"importance: the function gave no scores of shape {tuple(param.shape)} for '{name}'")
        return {name: scores[name].detach().to(params[name].device) for name in names}


class OwnMoments(Tracker):
    """Exponential moments of the gradients since the task's start; a missing gradient counts as zero."""

    of_gradients = True

    def __init__(self, params: Params, rule: MomentRule, betas: Betas, absolute: bool):
        super().__init__(params)
        self.rule = rule
        self.betas = betas
        self.absolute = absolute
        self.first, self.second = (
            {name: torch.zeros_like(local(p), dtype=wide(p.dtype)) for name, p in params.items()} for _ in range(2)
        )

    def follow(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        grads = list(self._gradients(skipped).values())
        first = list(self.first.values())
        second = list(self.second.values())
        update_moments_(first, second, grads, self.betas, self.absolute, skipped)

    def scores(self, optimizer: Optimizer, steps: int, previous: Params) -> Mapping[str, Scores]:
        rule = partial(self.rule, step=steps, betas=self.betas)
        return {name: BlockScores(rule, self.first[name], self.second[name]) for name in self._names()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in (self.first, self.second) for tensor in tensors.values())

    def state_dict(self) -> State:
        moments = {"first": self.first, "second": self.second}
        return super().state_dict() | {
            part: {name: like(tensor, self.params[name]) for name, tensor in tensors.items()}
            for part, tensors in moments.items()
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        for name, param in self.params.items():
            self.first[name] = part_of(state["first"][name].to(param.device), param).clone()
            self.second[name] = part_of(state["second"][name].to(param.device), param).clone()


class OptimizerMoments(Tracker):
    """The moments that Adam or AdamW keeps, read at the reset: nothing is held here.

    Unlike :class:`OwnMoments`, Adam leaves the moments of a parameter unchanged in steps without a gradient for it.
    ``carried``: the optimiser may have been used in earlier tasks; its moments then include their last steps.
    """

    of_gradients = True

    def __init__(self, params: Params, rule: MomentRule, carried: bool = False):
        super().__init__(params)
        self.rule = rule
        self.carried = carried
        self.has_moments = False  # whether the optimiser had some
        self.begun = 0  # steps of the task when the moments began
        self.followed = 0  # steps since then, also those that a GradScaler skipped
        self.with_gradients: Counter[str] = Counter()  # how many of them had a gradient for each parameter

    def check(self, optimizer: Optimizer, steps: int) -> None:
        if not all("betas" in group for group in optimizer.param_groups):
            raise ValueError(f"source='optimizer' reads Adam's moments, but {_kind(optimizer)} has none: {OTHERWISE}")
        package = type(optimizer).__module__.partition(".")[0]
        if package in RENAMED:
            raise ValueError(_lacks(optimizer, "exp_avg"))
        if package in QUANTISED:
            raise ValueError(f"{_kind(optimizer)} keeps its moments quantised, too coarse to rank by: {OTHERWISE}")
        longest = max((float(state["step"]) for state in self._states(optimizer).values()), default=0)
        if longest > steps and not self.carried:
            raise ValueError(
                f"the optimizer has moments of {longest:.0f} steps, this task has had {steps}: make a new optimizer "
                "for each task, or use source='carried' to include them or 'own' (to resume from a saved state, call "
                "load_state_dict() before attach())"
            )
        least = self._least(optimizer, steps)
        if longest < least:
            raise ValueError(
                f"the optimizer has moments of {longest:.0f} steps, this task has had {least}: to resume, first load "
                "the optimizer's saved state; without one, start the task again (importance=moment_score() saves "
                "moments of its own)"
            )

    def _least(self, optimizer: Optimizer, steps: int) -> int:
        """The steps that at least one moment must have: those with a gradient for the same parameter.

        Steps before a resumption are taken to have had one.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        most = max((count for name, count in self.with_gradients.items() if id(self.params[name]) in held), default=0)
        return steps - self.begun - (self.followed - most)

    def moments_dropped(self, steps: int) -> None:
        self.begun = steps
        self.followed = 0
        self.with_gradients.clear()

    def follow(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if not self.has_moments and not self._states(optimizer):
            raise RuntimeError(
                "missing gradients: the optimizer has no moments after its step; call backward() before it"
            )
        self.has_moments = True
        self.followed += 1
        self.with_gradients.update(name for name, param in self.params.items() if param.grad is not None)

    def scores(self, optimizer: Optimizer, steps: int, previous: Params) -> Mapping[str, Scores]:
        """{name: scores} of the parameters that the optimiser has moments of."""
        self.check(optimizer, steps)
        betas = {id(p): group["betas"] for group in optimizer.param_groups for p in group["params"]}
        others = [name for name, p in self.params.items() if p.grad is not None and id(p) not in betas]
        if others:
            raise RuntimeError(
                f"source='optimizer' has no moments of '{others[0]}', which another optimizer trains: use "
                "importance=moment_score(), or one WeightSpaceConsolidation for each optimizer"
            )
        scores = {}
        for name, state in self._states(optimizer).items():
            step = float(state["step"])
            if step:
                beta1, beta2 = betas[id(self.params[name])]
                rule = partial(self.rule, step=step, betas=(float(beta1), float(beta2)))
                scores[name] = BlockScores(rule, local(state["exp_avg"]), local(state["exp_avg_sq"]))
        return scores

    def _states(self, optimizer):
        states = {name: optimizer.state[param] for name, param in self.params.items() if optimizer.state.get(param)}
        for name, state in states.items():
            missing = {"exp_avg", "exp_avg_sq", "step"} - state.keys()
            if missing:
                raise RuntimeError(_lacks(optimizer, min(missing)))
            if state["exp_avg"].shape != self.params[name].shape:  # as with GaLore, which projects the gradients
                raise RuntimeError(
                    f"source='optimizer' reads Adam's moments, but those of {_kind(optimizer)} do not have the shape "
                    f"of '{name}': {OTHERWISE}"
                )
        return states


class BlockScores:
    """The scores of one parameter, computed block by block on request, so that they take no memory.

    ``rule`` is a function of two lists of tensors; ``first`` and ``second`` are its arguments for this parameter.
    """

    def __init__(self, rule: Callable[[list[Tensor], list[Tensor]], list[Tensor]], first: Tensor, second: Tensor):
        self.rule = rule
        self.first = first
        self.second = second
        self.shape = first.shape
        self.device = first.device
        self.dtype = wide(first.dtype)

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        return self.rule([self.first[index].to(self.dtype)], [self.second[index].to(self.dtype)])[0]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments and averages: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _lacks(optimizer, moment):
    kind = _kind(optimizer)
    return f"source='optimizer' reads Adam's moments, but the state of {kind} has no '{moment}': {OTHERWISE}"


def _kind(optimizer):
    """The optimiser's class as its users write it: packages have classes of torch's names."""
    package = type(optimizer).__module__.partition(".")[0]
    prefix = {"torch": "torch.optim.", "__main__": ""}.get(package, f"{package}.")
    return prefix + type(optimizer).__name__
