"""The table of docs/paper.md on ImageNet-100: accuracies of the runs of exps/studies/night/imagenet100.json.

python docs/scripts/generate.py
"""

import pandas as pd
from figure import NAMES
from findings import NOT_RUN
from night_runs import EIGHT  # beside this file
from over_seeds import ROOT

from pycil_wsc.config.loading import load
from pycil_wsc.results.run_table import read

RUNS = ROOT / "results" / "studies" / "night" / "imagenet100.csv"
CONFIG = ROOT / "exps" / "studies" / "night" / "imagenet100.json"


def rows() -> list[tuple[str, ...]]:
    """The table's lines, the header first; empty without records. A cell has all seeds, or none of them."""
    if not RUNS.exists():
        return []
    averages = pd.DataFrame(read(RUNS), columns=["method", "memory", "average"])
    planned = [run.to_dict() for run in load(CONFIG)]
    seeds = len({run["seed"] for run in planned})
    sizes = sorted({run["memory_per_class"] for run in planned})
    table = [("method", *(f"{size} per class" for size in sizes))]
    for method in EIGHT:
        own = averages.loc[averages["method"].eq(method)]
        cells = [own.loc[own["memory"].eq(size), "average"] for size in sizes]
        texts = (f"{cell.mean():.2f} ± {cell.sem():.2f}" if len(cell) == seeds else NOT_RUN for cell in cells)
        table.append((NAMES[method], *texts))
    return table
