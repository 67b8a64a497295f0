"""The paper's tables. A run's row in each is determined by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pycil_wsc.report.names import changed_keys, studied_value
from pycil_wsc.report.rows import SCORING, Column
from pycil_wsc.results import Record

RESET, AVERAGE, RETAIN = "wsc.reset", "wsc.average", "wsc.retain"
IMPORTANCE, EVERY = "wsc.importance", "wsc.reset_every"
WSC = ("wsc",)


def _method(record: Record) -> str | None:
    return record.method


def _method_that_forgets(record: Record) -> str | None:
    return None if record.method == "joint" else record.method


def _value_of(key: str) -> Callable[[Record], str | None]:
    """Rows like ``random``, ``0.5``, ``every 5 epochs`` and ``0.5 without averaging``."""

    def row(record: Record) -> str:
        value = studied_value(record, key)
        number = isinstance(value, (int, float))
        text = f"every {value} epochs" if number and key == EVERY else f"{value:g}" if number else str(value)
        return text if studied_value(record, AVERAGE) else f"{text} without averaging"

    return row


def _reset_rule(record: Record) -> str | None:
    both = changed_keys(record) == {RESET, AVERAGE}
    return None if both or studied_value(record, RESET) == "none" else _value_of(RESET)(record)


def _ablated(record: Record) -> str | None:
    changed = changed_keys(record)
    if record.method == "replay":
        return None if changed else "replay"
    if RESET in changed and studied_value(record, RESET) != "none":
        return None
    if changed == {RESET, AVERAGE}:
        return "wsc with neither"
    return "wsc without reset" if RESET in changed else "wsc without averaging" if AVERAGE in changed else "wsc"


@dataclass(frozen=True)
class Study:
    """A table of average accuracies, with a row for each name that ``name`` gives to a run; None: it has no row."""

    slug: str
    title: str
    corner: str = "method"  # the heading of the rows
    name: Callable[[Record], str | None] = _method
    methods: tuple[str, ...] = ()  # that the study compares; empty: all
    studied: frozenset[str] | None = frozenset()  # keys that its runs may change; None: any that the main runs have
    changed: frozenset[str] = frozenset()  # keys that its runs must change
    with_memory: bool = True  # whether its runs have exemplars
    options: tuple[str, ...] = ()  # further keys that apply to some of the rows only
    plain: tuple[str, ...] = ()  # rows that do not make a study without others
    order: tuple[str, ...] = ()  # of the rows; others follow
    notes: tuple[str, ...] = ()
    costs: Sequence[Column] = ()  # of a row's runs, over all memory sizes

    def row(self, record: Record) -> str | None:
        """The row that a run belongs to, or None."""
        changed = changed_keys(record)
        if self.methods and record.method not in self.methods or bool(record.memory) != self.with_memory:
            return None
        if self.studied is not None and not self.changed <= changed <= self.studied:
            return None
        return self.name(record)


ACCURACY = Study("accuracy", "Average accuracy (CNN, top-1 %)", name=_method_that_forgets, studied=None)
RETAINED = Study(
    "retain-rate",
    "Share of the parameters that is retained at the reset: average accuracy (%)",
    RETAIN,
    _value_of(RETAIN),
    WSC,
    frozenset({RETAIN, AVERAGE}),
    plain=("0.2", "0.2 without averaging"),
    order=tuple(f"{share / 100:g}{end}" for end in ("", " without averaging") for share in range(101)),
)
STUDIES = (
    ACCURACY,
    Study(
        "ablation",
        "Ablation of reset and averaging: average accuracy (%)",
        name=_ablated,
        methods=("replay", "wsc"),
        studied=frozenset({RESET, AVERAGE}),
        plain=("replay", "wsc"),
        order=("replay", "wsc without reset", "wsc without averaging", "wsc with neither", "wsc"),
    ),
    Study(
        "importance",
        "Importance of a parameter: average accuracy (%)",
        IMPORTANCE,
        _value_of(IMPORTANCE),
        WSC,
        frozenset({IMPORTANCE}),
        options=("wsc.importance_samples", "wsc.probes"),
        plain=("moment",),
        order=("drift", "fisher", "hessian", "first_moment", "second_moment", "moment"),
        notes=(
            "Scoring, per run: seconds of training; peak memory in addition to the current weights and those before "
            "the task; passes over the data.",
        ),
        costs=SCORING,
    ),
    Study(
        "reset-rule",
        "Rule of the reset: average accuracy (%)",
        RESET,
        _reset_rule,
        WSC,
        frozenset({RESET, AVERAGE}),
        options=("wsc.shrink", "wsc.perturb", "wsc.replacement_rate", "wsc.maturity", "wsc.utility_decay"),
        plain=("blend", "blend without averaging"),
        order=("random", "revert", "shrink_perturb", "continual_backprop", "blend without averaging", "blend"),
    ),
    Study(
        "reset-frequency",
        "Frequency of the reset: average accuracy (%)",
        EVERY,
        _value_of(EVERY),
        WSC,
        frozenset({EVERY}),
        plain=("once",),
        order=("iteration", "epoch", "once"),
    ),
    RETAINED,
    Study(
        "retraining",
        "Full retraining (joint) and continual learning: average accuracy (%)",
        methods=("joint", "replay", "wsc"),
        plain=("replay", "wsc"),
        order=("joint", "replay", "wsc"),
    ),
    Study("zero-memory", "No memory: average accuracy (%)", with_memory=False),
    Study(
        "reservoir",
        "Exemplars chosen by reservoir sampling: average accuracy (%)",
        studied=frozenset({"exemplars"}),
        changed=frozenset({"exemplars"}),
    ),
)
