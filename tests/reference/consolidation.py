"""A slow reference for :class:`WeightSpaceConsolidation`: the equations, element by element, in Python floats.

It takes the same option objects but shares no arithmetic or scheduling code with the fast version, so that a test can
step both and compare them.
"""

import math
from collections.abc import Mapping
from typing import Any

from pycil_wsc.consolidation.averaging import Average
from pycil_wsc.consolidation.functional import Betas
from pycil_wsc.consolidation.importance import DriftScore, MomentScore, moment_score
from pycil_wsc.consolidation.resets import Blend, Reset, Revert
from pycil_wsc.studies.rival_resets import Random, ShrinkPerturb

Lists = dict[str, list[float]]


class ReferenceConsolidation:
    """Takes the same options, except a function as importance; weights, gradients and buffers are ``Lists``.

    Weights and buffers are changed in place. It attaches to no optimiser: call ``step`` after each optimiser step.
    ``Reset.momentum`` concerns the optimiser alone and is ignored. ``eligible`` is ``{name: [bool, ...]}``.
    ``moment_score(source="optimizer")`` computes the moments of an Adam that is new in this task; its betas may differ
    between parameter groups, so they are given as ``betas={name: (b1, b2)}``.
    """

    def __init__(
        self,
        weights: Lists,
        *,
        warmup_steps: int,
        retain: float = 0.2,
        importance: MomentScore | DriftScore = moment_score(),
        reset: Reset | None = Blend(min_warmup=50),
        average: Average | None = Average(),
        rank_scope: str = "global",
        eligible: Mapping[str, list[bool]] | None = None,
        buffers: Lists | None = None,
        betas: Mapping[str, Betas] | None = None,
    ):
        self.warmup_steps, self.retain, self.importance, self.reset = warmup_steps, retain, importance, reset
        if reset and warmup_steps < reset.min_warmup:
            self.reset = None
        self.average, self.rank_scope, self.eligible = average, rank_scope, eligible or {}
        self.betas = betas or dict.fromkeys(weights, getattr(importance, "betas", None) or (0.9, 0.999))
        self.previous = _copy(weights)  # theta_prev
        self.previous_buffers = _copy(buffers or {})
        self.m = {name: [0.0] * len(values) for name, values in weights.items()}
        self.v = _copy(self.m)
        self.t = {name: 0 for name in weights}  # updates of the moments
        self.has_gradient: set[str] = set()
        self.i = 0  # steps since the task's start
        self.mean: Lists = {}  # Theta
        self.samples, self.last_sample = 0, None  # number of samples; step of the latest
        if warmup_steps == 0 and average and average.start == "reset":
            self.sample(weights, buffers or {})

    def step(
        self,
        weights: Lists,
        gradients: Mapping[str, list[float] | None],
        buffers: Lists | None = None,
        skipped: bool = False,
    ) -> None:
        """``gradients[name]`` may be None. ``skipped``: a gradient scaler skipped the optimiser step."""
        if skipped:
            return
        self.i += 1
        self.update_moments(gradients)
        since = self.i - self.warmup_steps
        if self.reset:
            if since == 0 or (self.reset.every is not None and since > 0 and since % self.reset.every == 0):
                self.reset_weights(self.reset, weights, buffers or {})
        if self.average:
            if since == 0 and self.average.start == "reset":
                self.sample(weights, buffers or {})
            elif since > 0 and (self.i if self.average.count == "swa" else since) % self.j == 0:
                self.sample(weights, buffers or {})

    @property
    def j(self) -> int:
        """Steps between two samples."""
        assert self.average is not None
        every = self.average.every
        return max(1, math.floor(every * self.warmup_steps + 1e-9)) if every < 1 else int(every)

    def update_moments(self, gradients: Mapping[str, list[float] | None]) -> None:
        absolute = isinstance(self.importance, MomentScore) and self.importance.absolute
        for name, m in self.m.items():
            (beta1, beta2), v, gradient = self.betas[name], self.v[name], gradients[name]
            if gradient is not None:
                self.has_gradient.add(name)
            elif getattr(self.importance, "source", "own") == "optimizer":
                continue
            self.t[name] += 1
            for e in range(len(m)):
                g = 0.0 if gradient is None else gradient[e]
                m[e] = beta1 * m[e] + (1 - beta1) * (abs(g) if absolute else g)
                v[e] = beta2 * v[e] + (1 - beta2) * g * g

    def score(self, weights: Lists, name: str, e: int) -> float:
        """S_l = |m_hat_l| * v_hat_l, one of the two alone, or |theta_l - theta_prev_l|"""
        if isinstance(self.importance, DriftScore):
            return abs(weights[name][e] - self.previous[name][e])
        beta1, beta2 = self.betas[name]
        m_hat = self.m[name][e] / (1 - beta1 ** self.t[name])
        v_hat = self.v[name][e] / (1 - beta2 ** self.t[name])
        return {"moment": abs(m_hat) * v_hat, "first_moment": abs(m_hat), "second_moment": v_hat}[self.importance.kind]

    def reset_weights(self, reset: Reset, weights: Lists, buffers: Lists) -> None:
        alpha = reset.blend if isinstance(reset, Blend) else 0.0
        fresh: Any = {}
        if isinstance(reset, (Random, ShrinkPerturb)):
            fresh = {name: tensor.double().flatten().tolist() for name, tensor in reset.fresh().items()}
        ranked = {
            name: [e for e in range(len(values)) if name not in self.eligible or self.eligible[name][e]]
            for name, values in weights.items()
            if name in self.has_gradient
        }
        by_tensor = [[(name, e) for e in elements] for name, elements in ranked.items()]
        for group in by_tensor if self.rank_scope == "tensor" else [sum(by_tensor, [])]:
            best_first = sorted(group, key=lambda element: -self.score(weights, *element))  # stable: ties by position
            kept = 0 if isinstance(reset, ShrinkPerturb) else round(self.retain * len(group))
            for name, e in best_first[kept:]:
                if isinstance(reset, Random):
                    weights[name][e] = fresh[name][e]
                elif isinstance(reset, ShrinkPerturb):
                    weights[name][e] = reset.shrink * weights[name][e] + reset.perturb * fresh[name][e]
                else:
                    assert isinstance(reset, (Blend, Revert))
                    weights[name][e] = alpha * weights[name][e] + (1 - alpha) * self.previous[name][e]
        if reset.buffers:
            for name, values in buffers.items():
                for e in range(len(values)):
                    values[e] = alpha * values[e] + (1 - alpha) * self.previous_buffers[name][e]

    def sample(self, weights: Lists, buffers: Lists) -> None:
        assert self.average is not None
        now = {**weights, **buffers} if self.average.buffers else weights
        if not self.mean:
            self.mean = _copy(now)
        else:
            if self.average.count == "since_reset":
                n = self.samples
            elif self.average.count == "late":
                n = self.samples / (self.average.power + 1)
            else:
                n = self.i / self.j
            for name, values in now.items():
                for e in range(len(values)):
                    self.mean[name][e] = (n * self.mean[name][e] + values[e]) / (n + 1)
        self.samples += 1
        self.last_sample = self.i

    def finish(self, weights: Lists, buffers: Lists | None = None) -> None:
        if not self.average:
            return
        if self.average.last and self.last_sample != self.i:
            self.sample(weights, buffers or {})
        for name, values in self.mean.items():
            ({**weights, **(buffers or {})})[name][:] = values


def _copy(lists: Lists) -> Lists:
    return {name: list(values) for name, values in lists.items()}
