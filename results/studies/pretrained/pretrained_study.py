"""The study of a pre-trained transformer: each method's value, chosen by its trials; the table and figure of
docs/pretrained_study.md.

python results/studies/pretrained/pretrained_study.py    # writes the chosen values into exps/studies/pretrained.json
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "scripts"))

from over_seeds import ROOT, OfMethod, grouped, recorded, spread

from pycil_wsc.report.texts import method_name

STUDY = ROOT / "exps" / "studies" / "pretrained.json"
KEYS = {  # that the trials of a method vary; "init_lr" of the others
    "replay": "backbone_lr_factor",
    "icarl": "distill",
    "wsc": "wsc.retain",
    "slca": "backbone_lr_factor",
    "slda": "shrinkage",
}
LIKE_REPLAY = ("finetune", "icarl", "wsc")  # take its rate of the backbone
RATES = ("init_lr", "lrate")  # are equal
ORDER = (
    *("finetune", "replay", "wsc", "icarl", "slca"),
    *("l2p", "coda_prompt", "ease", "ease+wsc", "aper_adapter", "ranpac", "slda"),
)
LABELS = {  # (method, exemplars) -> where the label stands, if points are near others
    ("wsc", 20): ("right", -8, -4),
    ("wsc", 4): ("left", -4, 9),
    ("finetune", 0): ("right", -8, 2),
    ("ease", 0): ("right", -8, -9),
    ("ease+wsc", 0): ("right", -8, -21),
}


# ---- the trials ------------------------------------------------------------------------------------------------------


def trials() -> dict[str, dict[Any, float]]:
    """{method: {value of its key: accuracy on held-out training images}}."""
    found: dict[str, dict[Any, float]] = {}
    for run in recorded("pretrained", "trials"):
        key = KEYS.get(run["method"], "init_lr")
        found.setdefault(run["method"], {})[run[key]] = run["average"]
    return found


def chosen(method: str) -> dict[str, Any]:
    """The keys of a method that its trials choose."""
    tried = trials()
    if method not in tried:
        return {}
    best = max(tried[method], key=tried[method].__getitem__)
    key = KEYS.get(method, "init_lr")
    return dict.fromkeys(RATES, best) if key == "init_lr" else {key: best}


def choose() -> None:
    """Write the value of each method's best trial into the study's file."""
    text, of_replay = STUDY.read_text(), chosen("replay")
    for line in text.splitlines():
        if '"model_name"' not in line:
            continue
        entry = json.loads(line.strip().rstrip(","))
        method = entry["model_name"]
        values = chosen(method) | (of_replay if method in LIKE_REPLAY else {})
        known = {key: value for key, value in values.items() if key in entry}
        text = text.replace(json.dumps(entry), json.dumps(entry | known))
    STUDY.write_text(text)


# ---- the study -------------------------------------------------------------------------------------------------------


def runs() -> Mapping[str, OfMethod]:
    """{method: {exemplars per class: {seed: run}}}."""
    return grouped("pretrained", lambda run: run["method"])


def rows() -> list[tuple[str, ...]]:
    """The header and the rows of the page's table; empty without records."""
    every = runs()
    if not every:
        return []
    baseline = mean(every["replay"][20], "train_flops")
    lines: list[tuple[str, ...]] = [
        ("method", "exemplars", "average accuracy", "over Finetune", "last task", "training accuracy", "operations")
    ]
    finetune = every["finetune"][0]
    for name in ORDER:
        for size, of_size in sorted(every.get(name, {}).items()):
            average = spread([run["average"] for run in of_size.values()], "")
            over = "–"
            if name != "finetune":
                over = spread([run["average"] - finetune[seed]["average"] for seed, run in of_size.items()], "+")
            last = f"{mean(of_size, 'accuracy_4'):.1f}"
            trained = [run["trained_4"] for run in of_size.values() if "trained_4" in run]
            fitted = f"{statistics.mean(trained):.0f}" if trained else "–"
            operations = f"{mean(of_size, 'train_flops') / baseline:.2f}"
            lines.append((method_name(name), str(size), average, over, last, fitted, operations))
    return lines


def mean(of_size: Any, key: str) -> float:
    """The mean of a column over seeds."""
    values: list[float] = [run[key] for run in of_size.values()]
    return statistics.mean(values)


def points() -> list[dict[str, Any]]:
    """What the figure shows: a point for each method and memory."""
    every = runs()
    baseline = mean(every["replay"][20], "train_flops")
    return [
        {
            "method": name,
            "exemplars": size,
            "operations": round(mean(of_size, "train_flops") / baseline, 4),
            "average": round(mean(of_size, "average"), 2),
        }
        for name in ORDER
        for size, of_size in sorted(every.get(name, {}).items())
    ]


def draw(path: Path) -> None:
    """Write the figure."""
    from figure import OTHER, TEXT, WSC, pyplot, save

    plt, shown = pyplot(), points()
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for point in shown:
        color = WSC if point["method"] == "wsc" else OTHER
        axis.plot(point["operations"], point["average"], "o", color=color, markersize=4 + 0.3 * point["exemplars"])
        memory = f", {point['exemplars']}" if point["exemplars"] else ""
        place = point["operations"], point["average"]
        side, across, down = LABELS.get((point["method"], point["exemplars"]), ("left", 8, -4))
        axis.annotate(
            method_name(point["method"]) + memory,
            place,
            (across, down),
            textcoords="offset points",
            fontsize=11,
            color=color,
            ha=side,
        )
    axis.set_xlim(-0.03, 1.25)
    axis.set_xlabel("training operations, relative to Replay with 20 exemplars per class", color=OTHER)
    axis.set_ylabel("average accuracy, %", color=OTHER)
    axis.tick_params(colors=TEXT, labelcolor=OTHER)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, shown)


if __name__ == "__main__":
    choose()
