"""The table of replay methods in one pass on docs/streams.md: results/studies/one_pass.

python docs/scripts/generate.py
"""

import statistics

from over_seeds import OfMethod, Row, beside, grouped

from pycil_wsc.report.texts import method_name

SLOTS = (500, 2000, 5000)
MIDDLE = 2000
ORDER = ["ER", "ER, 3 steps a batch", "ER + WSC", "DER++", "ER-ACE", "CLS-ER"]


def rows() -> list[tuple[str, ...]]:
    """Average accuracy and area under the curve, the header first: ER's, and differences from it; operations."""
    runs = grouped("one_pass", row_name)
    if not runs:
        return []
    header = ("method", *(f"{slots:,}" for slots in SLOTS), "AUC", "operations")
    lines: list[tuple[str, ...]] = [header]
    for name in sorted(runs, key=ORDER.index):
        sizes = runs[name]
        accuracies = [beside(sizes, runs["ER"], slots, "average") for slots in SLOTS]
        area = beside(sizes, runs["ER"], MIDDLE, "anytime_auc")
        operations = f"{flops(sizes) / flops(runs['ER']):.2f}"
        lines.append((name, *accuracies, area, operations))
    return lines


def flops(sizes: OfMethod) -> float:
    """The mean of the operations of a method's runs."""
    return statistics.mean(run["train_flops"] for seeds in sizes.values() for run in seeds.values())


def row_name(run: Row) -> str:
    """The name of a row of the table of one pass."""
    name = method_name(run["method"])
    if run.get("steps_per_batch", 1) > 1:
        return f"{name}, {run['steps_per_batch']} steps a batch"
    return name
