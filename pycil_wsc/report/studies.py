"""The paper's tables. A run's row in each is determined by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pycil_wsc.report.groups import studied_value
from pycil_wsc.report.measures import SCORING, Measure
from pycil_wsc.report.tables import Column
from pycil_wsc.results import Record


@dataclass(frozen=True)
class Study:
    """A table of average accuracies. ``row(record, changed)`` names the row that a run belongs to, or None."""

    slug: str
    title: str
    corner: str
    row: Callable[[Record, set[str]], str | None]
    studied: tuple[str, ...] = ()  # the keys that distinguish the rows
    options: tuple[str, ...] = ()  # further keys that apply to some of the rows only
    plain: frozenset[str] = frozenset()  # rows that do not make a study without others
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    costs: Mapping[Column, Measure] = field(default_factory=dict)  # costs of a row's runs, over all memory sizes
    of_all_runs: bool = True  # False: only of the runs that belong to no study


def _is_wsc(record: Record) -> bool:
    return record.method == "wsc" and record.memory > 0


def _accuracy_row(record: Record, _: set[str]) -> str | None:
    return record.method if record.memory and record.method != "joint" else None


def _zero_memory_row(record: Record, changed: set[str]) -> str | None:
    return record.method if not record.memory and not changed else None


def _reservoir_row(record: Record, changed: set[str]) -> str | None:
    return record.method if changed == {"exemplars"} and record.memory else None


def _retraining_row(record: Record, changed: set[str]) -> str | None:
    return record.method if record.method in ("joint", "replay", "wsc") and record.memory and not changed else None


def _ablation_row(record: Record, changed: set[str]) -> str | None:
    if record.method == "replay" and record.memory and not changed:
        return "replay"
    if not _is_wsc(record) or not changed <= {"wsc.reset", "wsc.average"}:
        return None
    if "wsc.reset" in changed and studied_value(record, "wsc.reset") != "none":
        return None
    return {
        (): "wsc",
        ("wsc.reset",): "wsc without reset",
        ("wsc.average",): "wsc without averaging",
        ("wsc.average", "wsc.reset"): "wsc with neither",
    }[tuple(sorted(changed))]


def _importance_row(record: Record, changed: set[str]) -> str | None:
    return studied_value(record, "wsc.importance") if _is_wsc(record) and changed <= {"wsc.importance"} else None


def _reset_rule_row(record: Record, changed: set[str]) -> str | None:
    if not _is_wsc(record) or studied_value(record, "wsc.reset") == "none":
        return None
    if changed == {"wsc.average"}:
        return "blend without averaging"
    return studied_value(record, "wsc.reset") if changed <= {"wsc.reset"} else None


def _reset_frequency_row(record: Record, changed: set[str]) -> str | None:
    if not _is_wsc(record) or not changed <= {"wsc.reset_every"}:
        return None
    interval = studied_value(record, "wsc.reset_every")
    return interval if isinstance(interval, str) else f"every {interval} epochs"


def _retain_row(record: Record, changed: set[str]) -> str | None:
    """Names like ``0.5`` and ``0.5 without averaging``."""
    if not _is_wsc(record) or not changed <= {"wsc.retain", "wsc.average"}:
        return None
    rate = studied_value(record, "wsc.retain")
    share = f"{rate:g}" if isinstance(rate, (int, float)) else str(rate)
    return share + (" without averaging" if "wsc.average" in changed else "")


RETAIN = Study(
    "retain-rate",
    "Share of the parameters that is retained at the reset: average accuracy (%)",
    "wsc.retain",
    _retain_row,
    studied=("wsc.retain", "wsc.average"),
    plain=frozenset({"0.2", "0.2 without averaging"}),
    order=tuple(f"{share / 100:g}{end}" for end in ("", " without averaging") for share in range(101)),
)
STUDIES = (
    Study("accuracy", "Average accuracy (CNN, top-1 %)", "method", _accuracy_row, of_all_runs=False),
    Study(
        "ablation",
        "Ablation of reset and averaging: average accuracy (%)",
        "method",
        _ablation_row,
        studied=("wsc.reset", "wsc.average"),
        plain=frozenset({"replay", "wsc"}),
        order=("replay", "wsc without reset", "wsc without averaging", "wsc with neither", "wsc"),
    ),
    Study(
        "importance",
        "Importance of a parameter: average accuracy (%)",
        "wsc.importance",
        _importance_row,
        studied=("wsc.importance",),
        options=("wsc.importance_samples", "wsc.probes"),
        plain=frozenset({"moment"}),
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
        "wsc.reset",
        _reset_rule_row,
        studied=("wsc.reset", "wsc.average"),
        options=("wsc.shrink", "wsc.perturb", "wsc.replacement_rate", "wsc.maturity", "wsc.utility_decay"),
        plain=frozenset({"blend", "blend without averaging"}),
        order=("random", "revert", "shrink_perturb", "continual_backprop", "blend without averaging", "blend"),
    ),
    Study(
        "reset-frequency",
        "Frequency of the reset: average accuracy (%)",
        "wsc.reset_every",
        _reset_frequency_row,
        studied=("wsc.reset_every",),
        plain=frozenset({"once"}),
        order=("iteration", "epoch", "once"),
    ),
    RETAIN,
    Study(
        "retraining",
        "Full retraining (joint) and continual learning: average accuracy (%)",
        "method",
        _retraining_row,
        plain=frozenset({"replay", "wsc"}),
        order=("joint", "replay", "wsc"),
    ),
    Study("zero-memory", "No memory: average accuracy (%)", "method", _zero_memory_row),
    Study(
        "reservoir",
        "Exemplars chosen by reservoir sampling: average accuracy (%)",
        "method",
        _reservoir_row,
        studied=("exemplars",),
    ),
)
