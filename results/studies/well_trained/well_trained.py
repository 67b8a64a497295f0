"""Replay, WSC and fresh weights that fit their data: the tables of docs/claims.md, docs/results.md and README.md, and
their figure, from table.csv.

python docs/scripts/generate.py
"""

import json
import statistics
import sys
from math import isnan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "scripts"))

import numpy as np
import pandas as pd
from figure import OTHER, TEXT, WSC, pyplot, save
from findings import CONVERGED, Claim, Finding, by_chance, by_seed, differences, finding, summaries
from over_seeds import (
    LEVEL,
    ROOT,
    Row,
    after_each_task,
    detectable,
    estimate,
    interval,
    kept_by_holm,
    recorded,
    spread,
)
from scipy.stats import ttest_1samp

from pycil_wsc.report.texts import method_name

FILE = ROOT / "exps" / "studies" / "well_trained.json"
NEEDED = 10  # seeds, for a verdict
SIZES = {20: "20 %", 100: "100 %"}  # exemplars per class, of 100 images
AVERAGED, OTHER_ORDER, BATCH_NORM = "averaging alone", "Replay, other order", "Replay, batch norm recomputed"
FRESH, TWICE = "fresh weights", "fresh weights, twice the epochs"
ARMS = {  # the name of an arm -> its row in the table of runs, which is the paper's where that has it
    "Replay": "replay",
    OTHER_ORDER: OTHER_ORDER,
    BATCH_NORM: BATCH_NORM,
    AVERAGED: "wsc reset=none",
    "WSC": "wsc",
    FRESH: "joint",
    TWICE: "joint, twice the epochs",
}
R, W, A = ("replay",), ("wsc",), ("wsc reset=none",)
ALL, FEW = (100,), (20,)
COMPARED = {  # measure -> its name in the table of arms
    "average": "average accuracy",
    "last": "last accuracy",
    "among": "newest classes among themselves",
    "forgetting": "forgetting",
}


def at_both_sizes(claim: Claim) -> list[Claim]:
    """The claim at each memory size."""
    return [
        Claim(claim.text, claim.plus, claim.minus, (size,), study=claim.study, stated=claim.stated) for size in SIZES
    ]


CLAIMS = (
    Claim("Memory reduces forgetting", [R], [R], FEW, against=ALL, measure="forgetting"),
    Claim("Memory lowers plasticity", [R], [R], FEW, against=ALL, measure="among"),
    Claim("Fresh weights are more plastic than Replay's", [("joint",)], [R], ALL, measure="among_last"),
    Claim("Fresh weights in twice the epochs are more plastic", [(ARMS[TWICE],)], [R], ALL, measure="among_last"),
    Claim("WSC is more plastic than Replay", [W], [R], ALL, measure="among", stated="no number"),
    *at_both_sizes(Claim("WSC is ahead of Replay", [W], [R])),
    *at_both_sizes(Claim("Averaging alone is ahead of Replay", [A], [R], study="ablation")),
    *at_both_sizes(Claim("The reset adds to averaging alone", [W], [A], study="ablation")),
    *at_both_sizes(Claim("Recomputed batch norm alone is ahead", [(BATCH_NORM,)], [R], stated="no number")),
    Claim("WSC costs what Replay does", [W], [], (20, 100), (0.9, 1.1), measure="cost", stated="the same"),
)


# ---- the runs --------------------------------------------------------------------------------------------------------


def table_of(runs: list[Row]) -> pd.DataFrame:
    """A line per run with the measures that are compared. ``among`` and ``among_last`` are the accuracies on the newest
    task's classes among themselves, the mean over the later tasks and the last one's; ``trained`` is the lowest
    accuracy on the training images after a task.
    """
    lines = []
    for run in runs:
        arm = run.get("label") or method_name(run["method"])
        _, *among = after_each_task(run, "among_newest")
        lines.append(
            {
                "row": ARMS[arm],
                "share": run["memory"],
                "seed": run["seed"],
                "classes": 20,
                "images": run["images_trained"],
                "average": run["average"],
                "last": after_each_task(run, "accuracy")[-1],
                "among": statistics.fmean(among),
                "among_last": among[-1],
                "forgetting": run["forgetting"],
                "trained": min(after_each_task(run, "fitted")),
                "flops": run["train_flops"],
            }
        )
    return pd.DataFrame(lines)


def table() -> pd.DataFrame:
    """The table of the finished runs."""
    return table_of(recorded("well_trained"))


def pairs(table: pd.DataFrame, row: str, baseline: str, size: int, measure: str = "average") -> list[float]:
    """The differences between two arms at a memory size over the seeds that have both."""
    claim = Claim("", [(row,)], [(baseline,)], (size,))
    return differences(claim, by_seed(table, measure))[size].dropna().tolist()


def all_findings() -> list[Finding]:
    """What the runs say of the claims, in their order."""
    runs = table()
    return [finding(claim, runs) for claim in CLAIMS]


# ---- the tables ------------------------------------------------------------------------------------------------------


def gate() -> list[tuple[str, ...]]:
    """The lowest training accuracy after a task, over tasks and seeds, with all images in memory."""
    runs = table()
    lines: list[tuple[str, ...]] = [("all images in memory", "lowest training accuracy, %", "seeds", "gate")]
    for arm in ("Replay", FRESH, TWICE):
        trained = runs.loc[runs["row"].eq(ARMS[arm]) & runs["share"].eq(100), "trained"]
        if len(trained):
            met = "met" if trained.min() >= CONVERGED else "missed"
            lines.append((arm, f"{trained.min():.2f}", str(len(trained)), met))
    return lines


def claims() -> list[tuple[str, ...]]:
    """The header and the rows of the first table of docs/claims.md."""
    return summaries(all_findings(), NEEDED)


def below_claims() -> str:
    """How many seeds the claims have, Holm's correction, and the noise floor."""
    found = all_findings()
    count, lost = by_chance(found)
    preliminary, holm = "", ""
    if min(len(each.seeds) for each in found) < NEEDED:
        preliminary = f" With fewer than {NEEDED}, a verdict is preliminary."
    if count:
        holm = f" Verdicts that Holm's correction for {count} tests changes: {len(lost)}."
    few, all_images = gains(table(), OTHER_ORDER, "replay")
    return (
        f"Seeds of a claim: {seeds_of(found)}.{preliminary}{holm} "
        f"The noise: with another order of the data, Replay's average accuracy differs by {few} points with 20 % of "
        f"the images in memory, and by {all_images} with 100 %."
    )


def gains_of_both_parts() -> list[tuple[str, ...]]:
    """The header and the rows of README's table: what WSC and its parts add to the average accuracy, and the noise."""
    runs = table()
    both_sides = {
        "WSC minus Replay": ("wsc", "replay"),
        "averaging alone minus Replay": ("wsc reset=none", "replay"),
        "WSC minus averaging alone: the reset": ("wsc", "wsc reset=none"),
        "noise: Replay with another order of the data": (OTHER_ORDER, "replay"),
    }
    few, all_images = (f"{name} of the images in memory" for name in SIZES.values())
    networks = "[networks that fit their data](docs/claims.md)"
    header = (f"average accuracy, points, in {networks} ({seeds_of(all_findings())} seeds)", few, all_images)
    return [header, *((name, *gains(runs, *pair)) for name, pair in both_sides.items())]


def gains(runs: pd.DataFrame, row: str, baseline: str) -> list[str]:
    """The difference in average accuracy between two arms at each memory size, with its interval."""
    found = (pairs(runs, row, baseline, size) for size in SIZES)
    return [estimate(values, "+") if values else "–" for values in found]


def seeds_of(found: list[Finding]) -> str:
    """How many seeds the claims have, of those that are planned."""
    counts = sorted({len(each.seeds) for each in found})
    planned = len(json.loads(FILE.read_text(encoding="utf-8"))["seed"])
    return f"{' to '.join(map(str, [counts[0], *counts[1:][-1:]]))} of {planned}"


def arms() -> list[tuple[str, ...]]:
    """The header and the rows of the table of docs/results.md: Replay's means, and differences from it."""
    runs = table()
    cost = by_seed(runs, "cost")
    header = ("memory, %", "", *COMPARED.values(), "detectable", "lowest training accuracy", "operations", "seeds")
    lines: list[tuple[str, ...]] = [header]
    for size in SIZES:
        for arm, row in ARMS.items():
            of_arm = runs.loc[runs["row"].eq(row) & runs["share"].eq(size)]
            found = compared(runs, row, size)
            if not found["average"]:
                continue
            is_replay = row == "replay"
            cells = [spread(values, "" if is_replay else "+") for values in found.values()]
            gain = found["average"]
            least = "" if is_replay or len(gain) < 2 else f"{detectable(len(gain)) * interval(gain)[1]:.2f}"
            operations = f"{cost[f'{row}@{size}'].mean():.2f}"
            lines.append((str(size), arm, *cells, least, f"{of_arm['trained'].min():.2f}", operations, str(len(gain))))
    return lines


def compared(runs: pd.DataFrame, row: str, size: int) -> dict[str, list[float]]:
    """{measure: an arm's differences from Replay over equal seeds}; for Replay, its values."""
    if row != "replay":
        return {measure: pairs(runs, row, "replay", size, measure) for measure in COMPARED}
    replay = runs.loc[runs["row"].eq(row) & runs["share"].eq(size)]
    return {measure: replay[measure].tolist() for measure in COMPARED}


def below_arms() -> str:
    """How many differences of the table of arms are left after Holm's correction."""
    runs, chances = table(), {}
    for size in SIZES:
        for row in ARMS.values():
            for measure, values in compared(runs, row, size).items():
                if row != "replay" and len(set(values)) > 1:
                    chances[row, size, measure] = float(np.asarray(ttest_1samp(values, 0))[1])
    if not chances:
        return "No difference has two seeds yet."
    told = [chance for chance in chances.values() if chance <= LEVEL]
    return (
        f"Of the {len(chances)} differences with two seeds or more, {len(told)} exclude 0, and "
        f"{len(kept_by_holm(chances))} still do after Holm's correction."
    )


# ---- the figure ------------------------------------------------------------------------------------------------------


def points() -> dict[str, dict[str, list[float]]]:
    """{memory: {arm: [mean gain over Replay in average accuracy, half-width of its 95 % interval or 0]}}."""
    runs = table()
    shown: dict[str, dict[str, list[float]]] = {}
    for size, name in SIZES.items():
        for arm, row in list(ARMS.items())[1:]:
            values = pairs(runs, row, "replay", size)
            if values:
                mean, half = interval(values)
                shown.setdefault(name, {})[arm] = [round(mean, 4), 0.0 if isnan(half) else round(half, 4)]
    return shown


def draw(path: Path) -> None:
    """Write the figure: each arm's gain over Replay with its interval, at both memory sizes."""
    plt, shown = pyplot(), points()
    names = [arm for arm in list(ARMS)[:0:-1] if any(arm in of_size for of_size in shown.values())]
    figure, axis = plt.subplots(figsize=(4.2, 4.4), layout="constrained")
    for offset, color, (size, of_size) in zip((0.16, -0.16), (OTHER, WSC), shown.items(), strict=False):
        for arm, (mean, half) in of_size.items():
            label = f"{size} in memory" if arm == OTHER_ORDER else None
            place = names.index(arm) + offset
            axis.errorbar(mean, place, xerr=half, color=color, marker="o", markersize=6, capsize=3, label=label)
    axis.axvline(0, color=TEXT, linewidth=0.8)
    axis.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axis.tick_params(colors=TEXT, labelcolor=OTHER)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel("average accuracy minus Replay's, points", fontsize=12, color=OTHER)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11, handletextpad=0.2)
    save(figure, path, shown)
