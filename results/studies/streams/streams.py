"""The table of replay methods whose memory is filled by each step on docs/abundant.md: results/studies/streams.

python docs/scripts/generate.py
"""

import statistics

from over_seeds import Row, beside, grouped

from pycil_wsc.report.texts import method_name

SIZES = {1: "4 %", 10: "40 %", 25: "100 %"}  # exemplars per class, of 25 images
ALL = 25
AFTER_TASK = "after a task"
IN_STEP = "in each step"
REPLAY = "Replay", AFTER_TASK
MIS_SCALED = "DER++", AFTER_TASK  # the page says why
ORDER = [REPLAY, ("ER", IN_STEP)]
ORDER += [(name, filled) for name in ("DER++", "ER-ACE", "CLS-ER") for filled in (AFTER_TASK, IN_STEP)]


def rows() -> list[tuple[str, ...]]:
    """Average accuracy at Replay's operations, the header first: Replay's, and differences from it; forgetting."""
    filled_by_steps = grouped("streams", row_name)
    if not filled_by_steps:
        return []
    runs = grouped("abundant", earlier_name) | filled_by_steps
    lines: list[tuple[str, ...]] = [("method", "memory filled", *SIZES.values(), "forgetting, 100 %")]
    for name in sorted(runs, key=ORDER.index):
        method, filled = name
        accuracies = [beside(runs[name], runs[REPLAY], size, "average") for size in SIZES]
        forgetting = statistics.mean(run["forgetting"] for run in runs[name][ALL].values())
        marked = f"{method} (mis-scaled)" if name == MIS_SCALED else method
        lines.append((marked, filled, *accuracies, f"{forgetting:.1f}"))
    return lines


def row_name(run: Row) -> tuple[str, str]:
    """The method of a row of the table of several passes, and when the memory is filled."""
    return method_name(run["method"]), AFTER_TASK if run["memory_update"] == "task" else IN_STEP


def earlier_name(run: Row) -> tuple[str, str] | None:
    """The same for a run of the study of plentiful memory, if it is in this table."""
    name = method_name(run["method"]), AFTER_TASK
    return name if name in ORDER and run["method"] != "cls_er" and run["exemplars"] == "herding" else None
