"""The tables of replay methods in streams: results/studies/one_pass on docs/streams.md, and results/studies/streams on
docs/abundant.md.

python docs/scripts/generate.py
"""

import statistics

from over_seeds import OfMethod, Row, beside, grouped  # beside this file

from pycil_wsc.report.texts import method_name

SIZES = {1: "4 %", 10: "40 %", 25: "100 %"}  # exemplars per class, of 25 images
ALL = 25
SLOTS = (500, 2000, 5000)
MIDDLE = 2000


def one_pass() -> list[tuple[str, ...]]:
    """Average accuracy and area under the curve, the header first: ER's, and differences from it; operations."""
    runs = grouped("one_pass", one_pass_name)
    if not runs:
        return []
    header = ("method", *(f"{slots:,}" for slots in SLOTS), "AUC", "operations")
    lines: list[tuple[str, ...]] = [header]
    for name in sorted(runs, key=ORDER_OF_ONE_PASS.index):
        sizes = runs[name]
        accuracies = [beside(sizes, runs["ER"], slots, "average") for slots in SLOTS]
        area = beside(sizes, runs["ER"], MIDDLE, "anytime_auc")
        operations = f"{flops(sizes) / flops(runs['ER']):.2f}"
        lines.append((name, *accuracies, area, operations))
    return lines


def flops(sizes: OfMethod) -> float:
    """The mean of the operations of a method's runs."""
    return statistics.mean(run["train_flops"] for seeds in sizes.values() for run in seeds.values())


ORDER_OF_ONE_PASS = ["ER", "ER, 3 steps a batch", "ER + WSC", "DER++", "ER-ACE", "CLS-ER"]


def one_pass_name(run: Row) -> str:
    """The name of a row of the table of one pass."""
    name = method_name(run["method"])
    if run.get("steps_per_batch", 1) > 1:
        return f"{name}, {run['steps_per_batch']} steps a batch"
    return name


def several_passes() -> list[tuple[str, ...]]:
    """Average accuracy at Replay's operations, the header first: Replay's, and differences from it; forgetting."""
    filled_by_steps = grouped("streams", several_passes_name)
    if not filled_by_steps:
        return []
    runs = grouped("abundant", earlier_name) | filled_by_steps
    lines: list[tuple[str, ...]] = [("method", "memory filled", *SIZES.values(), "forgetting, 100 %")]
    for name in sorted(runs, key=ORDER.index):
        method, filled = name
        accuracies = [beside(runs[name], runs[REPLAY], size, "average") for size in SIZES]
        forgetting = statistics.mean(run["forgetting"] for run in runs[name][ALL].values())
        lines.append((method, filled, *accuracies, f"{forgetting:.1f}"))
    return lines


AFTER_TASK, IN_STEP = "after a task", "in each step"
REPLAY = "Replay", AFTER_TASK
ORDER = [REPLAY, ("ER", IN_STEP)]
ORDER += [(name, filled) for name in ("DER++", "ER-ACE", "CLS-ER") for filled in (AFTER_TASK, IN_STEP)]


def several_passes_name(run: Row) -> tuple[str, str]:
    """The method of a row of the table of several passes, and when the memory is filled."""
    return method_name(run["method"]), AFTER_TASK if run["memory_update"] == "task" else IN_STEP


def earlier_name(run: Row) -> tuple[str, str] | None:
    """The same for a run of the study of plentiful memory, if it is in this table."""
    name = method_name(run["method"]), AFTER_TASK
    return name if name in ORDER and run["method"] != "cls_er" and run["exemplars"] == "herding" else None
