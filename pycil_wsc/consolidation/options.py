"""Options of Weight Space Consolidation, as hosts read them from their files: declared, checked and built in one place.

Plain dataclasses, whose fields have their documentation and limits as metadata. Reading them needs no torch.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pycil_wsc.consolidation.epochs import warmup_in_steps, whole_part

if TYPE_CHECKING:
    from torch import Tensor

    from pycil_wsc.consolidation.averaging import Average
    from pycil_wsc.consolidation.importance import Importance
    from pycil_wsc.consolidation.resets import Reset
    from pycil_wsc.consolidation.weight_space_consolidation import WeightSpaceConsolidation


Arguments = dict[str, Any]  # keyword arguments of `WeightSpaceConsolidation`


def option(default: object, doc: str, **limits: object) -> Any:
    """A field of an options class; ``limits``: ``low``, ``high``, ``above``, ``below`` and ``choices``, and roles that
    a host gives to its keys.
    """
    return field(default=default, metadata={"doc": doc, **limits})


@dataclass(frozen=True)
class WSCOptions:
    """Options for any training program. docs/wsc.md explains the choices that the paper leaves open.

    Raises ValueError, beginning with the option's name, if a value is not allowed.
    """

    warmup: float = option(0.25, "fraction of a task's epochs before the reset", low=0, high=1, affects="accuracy")
    retain: float = option(
        0.2,
        "fraction of the parameters that keep their weights at the reset (the paper's Q)",
        low=0,
        high=1,
        affects="accuracy",
        studied=5,
    )
    blend: float = option(
        0.5,
        "weight of a reset parameter's current value (the paper's alpha); its value before the task has the remaining"
        " weight",
        low=0,
        high=1,
        affects="accuracy",
    )
    rank_scope: str = option(
        "global", "rank over all parameters together (`global`) or within each `tensor`", choices=("global", "tensor")
    )
    reset: str = option(
        "blend",
        "`blend` with the weights before the task, `revert` to them, or `none`",
        choices=("blend", "revert", "none"),
        studied=2,
    )
    average: bool = option(True, "average the weights after the reset", studied=4)
    # `before` of `average_every` and `average_count`: the earlier default, used by finished runs and their folder names
    average_every: int | float = option(
        0.01,
        "averaging interval (the paper's j) in epochs; a value below 1 is a fraction of the warm-up's steps, at least "
        "one step",
        above=0,
        before=5,
    )
    average_count: str = option(
        "late",
        "`late` gives later samples more weight, `since_reset` is a plain mean, `absolute` is the paper's n = i/j with"
        " i counted from the task's start, `swa` is the same with samples where j divides i",
        choices=("late", "since_reset", "absolute", "swa"),
        before="since_reset",
    )
    average_power: float = option(
        3.0, "`late`: the weight of the k-th sample is about k to this power; 0 is a plain mean", low=0
    )
    average_last: bool = option(True, "include the task's last weights in the average")
    first_task: bool = option(False, "also consolidate in the first task")

    def __post_init__(self) -> None:
        self._check_each()
        if self.warmup >= 1 and self.reset != "none":
            raise ValueError("warmup: 1 leaves no step after the reset; use a smaller value")
        if self.average_every >= 1 and self.average_every % 1:
            raise ValueError(f"average_every: {self.average_every} is neither a whole number nor below 1")

    def _check_each(self) -> None:
        """Give each value the type of its option, and check its limits; for a host that has not done so."""
        hints = _hints(type(self))
        for option in fields(self):
            if option.metadata:
                value = _typed(option.name, getattr(self, option.name), hints[option.name])
                object.__setattr__(self, option.name, value)
                _check_limits(option.name, value, option.metadata)

    def build(
        self, named_parameters: Iterable[tuple[str, Tensor]], epochs: int, per_epoch: int = 1, **given: Any
    ) -> WeightSpaceConsolidation:
        """The consolidation of a task of ``epochs`` epochs of ``per_epoch`` optimiser steps.

        A host that does not count epochs gives the number of steps as ``epochs``: one step is then one epoch.

        Args:
            named_parameters: as for :class:`WeightSpaceConsolidation`.
            epochs: the task's epochs.
            per_epoch: optimiser steps of an epoch.
            given: arguments of :class:`WeightSpaceConsolidation`, instead of those that the options describe.

        Raises:
            ValueError: an argument is not allowed, or the task is too short.
        """
        from pycil_wsc.consolidation.weight_space_consolidation import WeightSpaceConsolidation  # needs torch

        arguments = self.arguments(per_epoch) | given
        if "warmup_steps" not in given:
            resets = arguments["reset"] is not None
            arguments["warmup_steps"] = warmup_in_steps(self.warmup, epochs, per_epoch, resets)
        consolidation = WeightSpaceConsolidation(named_parameters, **arguments)
        consolidation.check_fits(epochs * per_epoch)
        return consolidation

    def arguments(self, per_epoch: int) -> Arguments:
        """The arguments of :class:`WeightSpaceConsolidation` that follow from the options alone."""
        return {
            "retain": self.retain,
            "reset": self.reset_rule(per_epoch),
            "average": self.average_rule(per_epoch),
            "rank_scope": self.rank_scope,
        }

    def reset_rule(self, per_epoch: int) -> Reset | None:
        """The reset, or None. A rule that these options do not know is the host's to build."""
        from pycil_wsc.consolidation.resets import Blend, Revert

        every = self.steps_between_resets(per_epoch)
        if self.reset == "blend":
            return Blend(self.blend, every=every)
        return Revert(every=every) if self.reset == "revert" else None

    def steps_between_resets(self, per_epoch: int) -> int | None:
        """Optimiser steps between resets; None for a single reset."""
        return None

    def average_rule(self, per_epoch: int) -> Average | None:
        from pycil_wsc.consolidation.averaging import Average

        if not self.average:
            return None
        every = self.average_every if self.average_every < 1 else int(self.average_every) * per_epoch
        return Average(every, count=self.average_count, last=self.average_last, power=self.average_power)


@dataclass(frozen=True)
class EpochOptions(WSCOptions):
    """Options for hosts that train a task by epochs, with a learning-rate schedule."""

    importance: str = option(
        "moment",
        "score that ranks the parameters: `moment`, `first_moment`, `second_moment` or `drift`",
        choices=("moment", "first_moment", "second_moment", "drift"),
        studied=1,
    )
    betas: tuple[float, ...] = option(
        (0.9, 0.999), "decay of the gradient's first and second moments", low=0, below=1, affects="accuracy"
    )
    reset_every: str | int = option(
        "once",
        "how often to reset once the warm-up has ended: `once`, each `epoch` or `iteration`, or a number of epochs",
        studied=3,
    )
    average_lr: float | None = option(
        0.1,
        "constant learning rate after the reset, by default `lrate` (with Adam null); null keeps the schedule (why: "
        "see [WSC](wsc.md))",
        low=0,
    )
    average_anneal: int = option(5, "epochs of cosine annealing from the schedule's rate to `average_lr`", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        every = self.reset_every
        if every not in ("once", "epoch", "iteration") and (isinstance(every, str) or every < 1):
            raise ValueError(f"reset_every: {every!r} is not once, epoch, iteration or a number of epochs")
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected two numbers, got {list(self.betas)}")

    def arguments(self, per_epoch: int) -> Arguments:
        return super().arguments(per_epoch) | {"importance": self.score()}

    def score(self) -> Importance | None:
        """The importance, or None if it is one that these options do not know, which the host adds."""
        from pycil_wsc.consolidation.importance import MOMENT_SCORES, drift_score

        if self.importance in MOMENT_SCORES:
            first, second = self.betas
            return MOMENT_SCORES[self.importance]((first, second))
        return drift_score() if self.importance == "drift" else None

    def steps_between_resets(self, per_epoch: int) -> int | None:
        if isinstance(self.reset_every, str):
            return {"once": None, "epoch": per_epoch, "iteration": 1}[self.reset_every]
        return self.reset_every * per_epoch

    @property
    def holds_rate(self) -> bool:
        """Whether the learning rate is held at ``average_lr`` after the reset; otherwise its schedule stays."""
        return self.average and self.average_lr is not None

    def held_from(self, epochs: int, warmup_steps: int) -> int:
        """The epoch from which the learning rate is held: the first one after a warm-up of ``warmup_steps`` steps.

        A warm-up of less than an epoch holds the rate from the next epoch on; without a warm-up, it is held from the
        start.
        """
        return max(1, whole_part(self.warmup, epochs)) if warmup_steps else 0


@functools.cache
def _hints(options: type) -> dict[str, Any]:
    """The types of a class's fields, evaluated: that takes longer than all checks of an instance."""
    return typing.get_type_hints(options)


def _typed(name: str, value: Any, kind: type | types.UnionType | types.GenericAlias) -> Any:
    """``value`` as the type ``kind`` of the option: a list becomes a tuple, and a whole number a float."""
    for alternative in typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
        if typing.get_origin(alternative) is tuple and isinstance(value, (list, tuple)):
            return tuple(_typed(name, item, typing.get_args(alternative)[0]) for item in value)
        if alternative is float and type(value) in (int, float):
            return float(value)
        if type(value) is alternative:
            return value
    raise ValueError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {value!r}")


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    choices = limits.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{name}: '{value}' is not one of {', '.join(map(str, choices))}")
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, (str, bool)) or item is None:
            continue
        for limit, holds, reason in _LIMITS:
            bound = limits.get(limit)
            if bound is not None and not holds(item, bound):
                raise ValueError(f"{name}: {item} {reason} {bound}")


_LIMITS = (
    ("low", operator.ge, "is below"),
    ("high", operator.le, "is above"),
    ("above", operator.gt, "is not above"),
    ("below", operator.lt, "is not below"),
)
