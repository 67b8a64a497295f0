"""What was asked of a consolidation, checked, and the schedule that follows from it."""

from dataclasses import asdict, dataclass
from functools import partial

from pycil_wsc.consolidation.functional import blend_, shrink_perturb_
from pycil_wsc.consolidation.importance import MOMENT_SCORES

CHOICES = {
    "moments": ("own", "optimizer", "carried"),
    "rank_scope": ("global", "tensor"),
    "reset": ("blend", "revert", "random", "shrink_perturb", "none"),
    "average_start": ("reset", "first"),
    "average_count": ("since_reset", "absolute"),
}


@dataclass(frozen=True)
class Options:
    """The options of :class:`WeightSpaceConsolidation`, which documents them. A bad value raises ValueError."""

    warmup_steps: int | None
    average_every: int
    retain: float
    blend: float
    importance: str
    moments: str
    betas: tuple[float, float] | None
    score_abs: bool
    rank_scope: str
    reset: str
    shrink: float
    perturb: float
    reset_every: int | None
    reset_momentum: bool
    average: bool
    average_start: str
    average_count: str
    average_last: bool
    reset_buffers: bool
    average_buffers: bool

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        for name, least in ("warmup_steps", 0), ("average_every", 1), ("reset_every", 1):
            self._check_whole(name, least)
        for name in "retain", "blend":
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is a share: give a number from 0 to 1")
        if self.perturb < 0 or not 0 <= self.shrink <= 1:
            raise ValueError(
                f"shrink={self.shrink!r}, perturb={self.perturb!r}: give a share from 0 to 1 and a factor of at least 0"
            )
        if self.resets and self.moments != "own" and (self.betas is not None or self.score_abs):
            raise ValueError("betas and score_abs are the optimizer's own affair: leave them out, or use moments='own'")
        if self.betas is not None and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"betas={self.betas!r}: give two numbers, each at least 0 and below 1")
        if self.resets and self.warmup_steps == 0:
            raise ValueError("warmup_steps=0 leaves no gradient to rank by: give at least 1, or reset='none'")
        if self.average and self.average_count == "absolute" and self.average_start != "reset":
            raise ValueError("average_count='absolute' starts from the reset weights: it needs average_start='reset'")

    def _check_whole(self, name, least):
        value = getattr(self, name)
        if value is None and name in ("reset_every", "warmup_steps"):
            return
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of optimiser steps, at least {least}")

    @property
    def resets(self):
        """Whether there is a reset, and so a need for theta_prev and for scores."""
        return self.reset != "none"

    @property
    def by_moments(self):
        """Whether weights are ranked by moments of their gradients."""
        return self.importance in MOMENT_SCORES

    @property
    def needs_previous(self):
        """Whether theta_prev is needed at the reset."""
        return self.reset in ("blend", "revert") or self.resets and not self.by_moments or self.reset_buffers

    @property
    def kept(self):
        """Share of the elements that the reset keeps: shrink and perturb is done to all."""
        return 0.0 if self.reset == "shrink_perturb" else self.retain

    @property
    def reset_blend(self):
        """Share of the present weights in what the reset leaves: to revert is to blend with none of them."""
        return self.blend if self.reset == "blend" else 0.0

    @property
    def rule(self):
        """(params, others, keep) -> None: what is done to the elements that are not kept."""
        if self.reset == "shrink_perturb":
            return partial(shrink_perturb_, shrink=self.shrink, perturb=self.perturb)
        return partial(blend_, blend=self.reset_blend)

    def resets_at(self, step):
        """Whether the weights are reset after optimiser step ``step`` (from 1)."""
        if self.warmup_steps is None:
            return False
        since = step - self.warmup_steps
        return self.resets and (since == 0 or bool(self.reset_every) and since > 0 and since % self.reset_every == 0)

    def samples_at(self, step):
        """Whether the weights after optimiser step ``step`` (0: before the first) enter the average."""
        if self.warmup_steps is None:
            return False
        since = step - self.warmup_steps
        first = 0 if self.average_start == "reset" else self.average_every
        return self.average and since >= first and since % self.average_every == 0

    def check_fits(self, steps):
        """Raise ValueError if a task of ``steps`` optimiser steps could not be finished."""
        if steps < self.warmup_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than the {steps} steps of the task: shorten it")
        first = self.warmup_steps + (0 if self.average_start == "reset" else self.average_every)
        if self.average and not self.average_last and steps < first:
            raise ValueError(
                f"no sample of the average within the {steps} steps of the task: shorten average_every, or set average_last"
            )

    def weight_of_average(self, step, samples):
        """n in Theta <- (n Theta + theta) / (n + 1) at ``step``, for an average of ``samples`` samples so far."""
        return samples if self.average_count == "since_reset" else step / self.average_every

    def check_saved(self, saved):
        """Raise ValueError if a state was saved under other options: going on would follow another schedule."""
        saved = {
            "moments": "own",
            "importance": "moment",
            "shrink": self.shrink,
            "perturb": self.perturb,
        } | saved  # of a state from before there was a choice
        for name, value in asdict(self).items():
            if name not in saved or saved[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={saved.get(name)!r}, this object has {name}={value!r}"
                )
