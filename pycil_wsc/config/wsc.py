"""The keys ``wsc.*``."""

from dataclasses import dataclass
from functools import partial

from pycil_wsc import keys

key = partial(keys.key, decides="later tasks")  # a first task that is consolidated (`first_task`) is not shared


@dataclass(frozen=True)
class WSCOptions:
    """Weight Space Consolidation. Where the paper leaves a choice, the README has the facts and the reasons."""

    warmup: float = key(0.25, "share of a task's epochs before the reset", low=0, high=1)
    trigger: str = key(
        "warmup",
        "what ends the warm-up: its share (`warmup`), or a plateau of the `training_loss` or of the loss of `held_out`"
        " exemplars; without one the task ends as Replay",
        choices=("warmup", "training_loss", "held_out"),
    )
    patience: int = key(3, "a plateau is as many epochs without a new least loss", low=1)
    held_out: float = key(
        0.1, "share of each class's exemplars that `held_out` does not train on, at least one of two", low=0, high=0.5
    )
    retain: float = key(
        0.2, "share of the parameters that keep their weights at the reset (the paper's Q)", low=0, high=1
    )
    blend: float = key(0.5, "weight of the current weights in a reset parameter (the paper's alpha)", low=0, high=1)
    importance: str = key(
        "moment",
        "what parameters are ranked by: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
    )
    importance_samples: int | None = key(
        None, "`fisher` and `hessian`: training samples to pass over, drawn by `seed`; null: all", low=1
    )
    probes: int = key(1, "`hessian`: random vectors of Hutchinson's estimate", low=1)
    betas: tuple[float, ...] = key((0.9, 0.999), "decay of the gradient's first and second moment", low=0, below=1)
    score_abs: bool = key(False, "first moment of the absolute gradient rather than of the gradient")
    rank_scope: str = key(
        "global", "rank over all parameters together (`global`) or within each `tensor`", choices=("global", "tensor")
    )
    reset: str = key(
        "blend",
        "`blend` with the previous task's weights, `revert` to them, `random` initial values, `shrink_perturb` all,"
        " `continual_backprop` (units, all through the task), or `none`",
        choices=("blend", "revert", "random", "shrink_perturb", "continual_backprop", "none"),
    )
    shrink: float = key(0.6, "`shrink_perturb`: factor of the current weights", low=0, high=1)
    perturb: float = key(0.01, "`shrink_perturb`: factor of the random initial values that are added", low=0)
    replacement_rate: float = key(
        1e-5, "`continual_backprop`: share of the mature units replaced in a step", low=0, high=1
    )
    maturity: int = key(1000, "`continual_backprop`: steps that a new unit is safe", low=0)
    utility_decay: float = key(0.99, "`continual_backprop`: decay of the utility's running mean", low=0, below=1)
    reset_every: str | int = key(
        "once",
        "how often to reset from the end of the warm-up on: `once`, each `epoch` or `iteration`, or a number of epochs",
    )
    reset_head: bool = key(True, "the head takes part in ranking and reset")
    reset_norm: bool = key(True, "batch norm's weights and biases take part in ranking and reset")
    reset_new_rows: bool = key(True, "the head's rows of new classes take part in ranking and reset")
    reset_momentum: bool = key(False, "clear the optimiser's momentum at the reset")
    reset_buffers: bool = key(False, "blend batch-norm statistics at the reset too")
    average: bool = key(True, "average the weights from the reset on")
    # Of these two, `before` is the earlier default, which finished runs and their folders' names have.
    average_every: int | float = key(
        0.01,
        "interval of the average (the paper's j) in `average_unit`s; below 1 a share of the warm-up's steps, at least"
        " one step",
        above=0,
        before=5,
    )
    average_unit: str = key("epoch", "unit of `average_every`: `epoch` or `iteration`", choices=("epoch", "iteration"))
    average_start: str = key(
        "reset",
        "the first weights averaged: those just `reset`, or those of the `first` interval after",
        choices=("reset", "first"),
    )
    average_count: str = key(
        "late",
        "`late` samples weigh more, `since_reset` is a plain mean, `absolute` the paper's n = i/j with i from the"
        " task's start, `swa` the same with samples where j divides i",
        choices=("late", "since_reset", "absolute", "swa"),
        before="since_reset",
    )
    average_power: float = key(32.0, "`late`: the k-th sample weighs about k to this power; 0 is a plain mean", low=0)
    average_last: bool = key(True, "the task's last weights enter the average")
    average_lr: float | None = key(
        0.1,
        "learning rate held after the reset; null keeps the schedule (in a prototype's single runs the average then"
        " lost, see above)",
        low=0,
    )
    average_anneal: int = key(5, "epochs in which the rate goes over to `average_lr` (cosine)", low=0)
    bn_update: str = key(
        "recompute",
        "batch-norm statistics of the average: a pass over the data, a `copy` of the last, or their `average`",
        choices=("recompute", "copy", "average"),
    )
    first_task: bool = key(False, "consolidate in the first task too")
