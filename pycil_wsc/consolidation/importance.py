"""The importance that weights are ranked by at the reset: small stateless objects that create a tracker for each task.

``importance=`` of :class:`WeightSpaceConsolidation` takes one of these, or any function
``({name: parameter}, {name: weights before the task}) -> {name: scores}``, which is called at the reset.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pycil_wsc.consolidation.functional import Betas, first_moment, moment_product, second_moment
from pycil_wsc.consolidation.trackers import (
    DriftTracker,
    FunctionTracker,
    OptimizerMoments,
    OwnMoments,
    Params,
    Tracker,
)

SOURCES = ("own", "optimizer", "carried")
RULES = {"moment": moment_product, "first_moment": first_moment, "second_moment": second_moment}


class Importance(Protocol):
    """Ranks elements by a score: those with the highest scores are kept at the reset."""

    @property
    def needs_previous(self) -> bool:
        """Whether scores depend on the weights before the task."""
        ...

    def track(self, params: Params) -> Tracker:
        """A tracker for one task of training ``params``, {name: parameter}."""
        ...


@dataclass(frozen=True)
class MomentScore:
    """A score from Adam's first and second moments of the gradients; see :func:`moment_score` for the options."""

    kind: str
    betas: Betas | None = None
    absolute: bool = False
    source: str = "own"
    needs_previous = False

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} is unknown; known: {', '.join(SOURCES)}")
        if self.source != "own" and (self.betas is not None or self.absolute):
            raise ValueError("betas and absolute are the optimizer's own: leave them out, or use source='own'")
        if self.source == "own":
            betas = (0.9, 0.999) if self.betas is None else tuple(map(float, self.betas))
            if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
                raise ValueError(f"betas={betas!r}: give two numbers, each at least 0 and below 1")
            object.__setattr__(self, "betas", betas)

    def track(self, params: Params) -> Tracker:
        if self.source == "own":
            assert self.betas is not None
            return OwnMoments(params, RULES[self.kind], self.betas, self.absolute)
        return OptimizerMoments(params, RULES[self.kind], carried=self.source == "carried")


def moment_score(betas: Betas | None = None, absolute: bool = False, source: str = "own") -> MomentScore:
    """The paper's score, S = |m_hat| * v_hat, of the moments of the gradients in the warm-up.

    Args:
        betas: decay rates of the two moments; None: (0.9, 0.999), or the optimiser's.
        absolute: use |g| instead of g for m.
        source: where the moments come from. ``"own"``: tracked here, for any optimiser, in two tensors of at least fp32
            per parameter. ``"optimizer"``: those of Adam or AdamW, read at the reset, which takes no memory; the
            optimiser must be new in each task, its betas apply, and with ``torch.optim.Adam`` weight decay is part of
            g. ``"carried"``: the same, for an optimiser that is kept from task to task; its moments include about the
            last 1 / (1 - beta) steps before the task.

    Raises:
        ValueError: a value is out of range or unknown, or betas are given for the optimiser's moments.
    """
    return MomentScore("moment", betas, absolute, source)


def first_moment_score(betas: Betas | None = None, absolute: bool = False, source: str = "own") -> MomentScore:
    """S = |m_hat|; arguments as for :func:`moment_score`."""
    return MomentScore("first_moment", betas, absolute, source)


def second_moment_score(betas: Betas | None = None, absolute: bool = False, source: str = "own") -> MomentScore:
    """S = v_hat; arguments as for :func:`moment_score`."""
    return MomentScore("second_moment", betas, absolute, source)


MOMENT_SCORES = {"moment": moment_score, "first_moment": first_moment_score, "second_moment": second_moment_score}


@dataclass(frozen=True)
class DriftScore:
    """S = |theta - theta_prev|; see :func:`drift_score`."""

    needs_previous = True

    def track(self, params: Params) -> Tracker:
        return DriftTracker(params)


def drift_score() -> DriftScore:
    """S = |theta - theta_prev|: how far the warm-up has moved each element."""
    return DriftScore()


@dataclass(frozen=True)
class FunctionScore:
    """Calls ({name: parameter}, {name: weights before the task}) -> {name: scores of the parameter's shape}."""

    function: Callable[[dict, dict], Mapping[str, Tensor]]
    needs_previous = True

    def track(self, params: Params) -> Tracker:
        return FunctionTracker(params, self.function)

    def __repr__(self) -> str:  # saved with the state, so it must be the same in every process
        return getattr(self.function, "__name__", type(self.function).__name__)


def as_importance(importance: Importance | Callable) -> Importance:
    """``importance`` itself, or a :class:`FunctionScore` if it is a function. Raises TypeError for anything else."""
    if hasattr(importance, "track"):
        return importance  # pyright: ignore[reportReturnType]
    if not callable(importance):
        raise TypeError(f"importance={importance!r}: give moment_score(), drift_score(), ..., or a function")
    return FunctionScore(importance)
