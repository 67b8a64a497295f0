"""The keys ``wsc.*``."""

from dataclasses import dataclass
from functools import partial

from pycil_wsc import keys

key = partial(keys.key, decides="later tasks")  # a consolidated first task (`first_task`) is not shared between runs


@dataclass(frozen=True)
class WSCOptions:
    """Options of Weight Space Consolidation. docs/wsc.md explains the choices that the paper leaves open."""

    warmup: float = key(0.25, "share of a task's epochs before the reset", low=0, high=1, affects="accuracy")
    trigger: str = key(
        "warmup",
        "what ends the warm-up: its share of the epochs (`warmup`), or a plateau of the `training_loss` or of the loss"
        " on `held_out` exemplars; without a plateau the task is trained as by Replay",
        choices=("warmup", "training_loss", "held_out"),
    )
    patience: int = key(3, "a plateau is this many epochs without a new lowest loss", low=1)
    held_out: float = key(
        0.1, "`held_out`: share of each class's exemplars excluded from training, at least one", low=0, high=0.5
    )
    retain: float = key(
        0.2,
        "share of the parameters that keep their weights at the reset (the paper's Q)",
        low=0,
        high=1,
        affects="accuracy",
    )
    blend: float = key(
        0.5, "weight of the current weights in a reset parameter (the paper's alpha)", low=0, high=1, affects="accuracy"
    )
    importance: str = key(
        "moment",
        "score that ranks the parameters: `moment`, `first_moment`, `second_moment`, `drift`, `fisher`, `hessian`",
    )
    importance_samples: int | None = key(
        None, "`fisher` and `hessian`: training samples used, drawn by `seed`; null: all", low=1
    )
    probes: int = key(1, "`hessian`: random vectors of Hutchinson's estimator", low=1)
    betas: tuple[float, ...] = key(
        (0.9, 0.999), "decay of the gradient's first and second moments", low=0, below=1, affects="accuracy"
    )
    score_abs: bool = key(False, "use the first moment of the absolute gradient instead of the gradient's")
    rank_scope: str = key(
        "global", "rank over all parameters together (`global`) or within each `tensor`", choices=("global", "tensor")
    )
    reset: str = key(
        "blend",
        "`blend` with the previous task's weights, `revert` to them, `random` initial values, `shrink_perturb` (all"
        " parameters), `continual_backprop` (units, throughout the task), or `none`",
        choices=("blend", "revert", "random", "shrink_perturb", "continual_backprop", "none"),
    )
    shrink: float = key(0.6, "`shrink_perturb`: factor of the current weights", low=0, high=1)
    perturb: float = key(0.01, "`shrink_perturb`: factor of the added random initial values", low=0)
    replacement_rate: float = key(
        1e-5, "`continual_backprop`: share of the mature units replaced per step", low=0, high=1
    )
    maturity: int = key(1000, "`continual_backprop`: steps during which a new unit is not replaced", low=0)
    utility_decay: float = key(0.99, "`continual_backprop`: decay of the running mean of the utility", low=0, below=1)
    reset_every: str | int = key(
        "once",
        "how often to reset once the warm-up has ended: `once`, each `epoch` or `iteration`, or every so many epochs",
    )
    reset_head: bool = key(True, "rank and reset the heads")
    reset_norm: bool = key(True, "rank and reset batch norm's weights and biases")
    reset_new_rows: bool = key(True, "rank and reset the rows of the heads that are new in a task")
    reset_momentum: bool = key(False, "clear the optimiser's momentum at the reset")
    reset_buffers: bool = key(False, "also blend batch-norm statistics at the reset")
    average: bool = key(True, "average the weights after the reset")
    # `before` of `average_every` and `average_count`: the earlier default, used by finished runs and their folder names
    average_every: int | float = key(
        0.01,
        "averaging interval (the paper's j) in units of `average_unit`; a value below 1 is a share of the warm-up's"
        " steps, at least one step",
        above=0,
        before=5,
    )
    average_unit: str = key("epoch", "unit of `average_every`: `epoch` or `iteration`", choices=("epoch", "iteration"))
    average_start: str = key(
        "reset",
        "the first weights to average: right after the `reset`, or after the `first` interval",
        choices=("reset", "first"),
    )
    average_count: str = key(
        "late",
        "`late` gives later samples more weight, `since_reset` is a plain mean, `absolute` is the paper's n = i/j with"
        " i counted from the task's start, `swa` is the same with samples where j divides i",
        choices=("late", "since_reset", "absolute", "swa"),
        before="since_reset",
    )
    average_power: float = key(
        32.0, "`late`: the weight of the k-th sample is about k to this power; 0 is a plain mean", low=0
    )
    average_last: bool = key(True, "include the task's last weights in the average")
    average_lr: float | None = key(
        0.1, "constant learning rate after the reset; null keeps the schedule (see [WSC](wsc.md) for why)", low=0
    )
    average_anneal: int = key(5, "epochs of cosine annealing from the schedule's rate to `average_lr`", low=0)
    bn_update: str = key(
        "recompute",
        "batch-norm statistics of the averaged weights: `recompute` in a pass over the data, `copy` the last ones, or"
        " `average` them",
        choices=("recompute", "copy", "average"),
    )
    first_task: bool = key(False, "also consolidate in the first task")
