"""What was asked of a consolidation, checked, and the schedule that follows from it."""

from dataclasses import asdict, dataclass

CHOICES = {
    "moments": ("own", "optimizer", "carried"),
    "rank_scope": ("global", "tensor"),
    "reset": ("blend", "revert", "none"),
    "average_start": ("reset", "first"),
    "average_count": ("since_reset", "absolute"),
}


@dataclass(frozen=True)
class Options:
    """The options of :class:`WeightSpaceConsolidation`, which documents them. A bad value raises ValueError."""

    warmup_steps: int
    average_every: int
    retain: float
    blend: float
    moments: str
    betas: tuple[float, float] | None
    score_abs: bool
    rank_scope: str
    reset: str
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
        if value is None and name == "reset_every":
            return
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of optimiser steps, at least {least}")

    @property
    def resets(self):
        """Whether there is a reset, and so a need for theta_prev and for scores."""
        return self.reset != "none"

    @property
    def reset_blend(self):
        """Share of the present weights in what the reset leaves: to revert is to blend with none of them."""
        return self.blend if self.reset == "blend" else 0.0

    def resets_at(self, step):
        """Whether the weights are reset after optimiser step ``step`` (from 1)."""
        since = step - self.warmup_steps
        return self.resets and (since == 0 or bool(self.reset_every) and since > 0 and since % self.reset_every == 0)

    def samples_at(self, step):
        """Whether the weights after optimiser step ``step`` (0: before the first) enter the average."""
        since = step - self.warmup_steps
        first = 0 if self.average_start == "reset" else self.average_every
        return self.average and since >= first and since % self.average_every == 0

    def weight_of_average(self, step, samples):
        """n in Theta <- (n Theta + theta) / (n + 1) at ``step``, for an average of ``samples`` samples so far."""
        return samples if self.average_count == "since_reset" else step / self.average_every

    def check_saved(self, saved):
        """Raise ValueError if a state was saved under other options: going on would follow another schedule."""
        saved = {"moments": "own"} | saved  # of a state from before there was a choice
        for name, value in asdict(self).items():
            if name not in saved or saved[name] != value:
                raise ValueError(f"the state was saved with {name}={saved.get(name)!r}, this object has {name}={value!r}")
