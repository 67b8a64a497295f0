"""The pages' figures: accuracy after each task of the paper's schedule, and accuracy against training cost."""

import json
import statistics
from pathlib import Path

import matplotlib

RECORDS = Path(__file__).parent.parent.parent / "results" / "studies" / "cifar100_short_all"
NAMES = {"replay": "Replay", "icarl": "iCaRL", "bic": "BiC", "wa": "WA", "der": "DER", "foster": "FOSTER"}
NAMES |= {"finetune": "Finetune", "memo": "MEMO", "joint": "Retraining", "wsc": "WSC"}
SCHEDULE = RECORDS.parent / "cifar100_paper_schedule"
PAPER = Path(__file__).parent.parent.parent / "pycil_wsc" / "report" / "paper.json"
WSC, OTHER, TEXT = "#c2410c", "#475569", "#64748b"  # readable on white and on dark pages


def points():
    """{exemplars per class: {method: [training operations over Replay's, average accuracy]}}."""
    runs = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json")) if "milestones" not in path.name]
    found = {}
    for run in runs:
        memory, method = run["config"]["memory_per_class"], run["config"]["model_name"]
        found.setdefault(memory, {})[method] = [run["train_flops"], run["avg_acc"]]
    found = {memory: values for memory, values in found.items() if "replay" in values}
    return {
        memory: {name: [flops / values["replay"][0], accuracy] for name, (flops, accuracy) in values.items()}
        for memory, values in found.items()
    }


def curves(records=SCHEDULE):
    """{exemplars per class: {method: accuracy after each task, of each seed}}: Replay and WSC, plain mean."""
    found = {}
    for path in sorted(records.glob("*.json")):
        run = json.loads(path.read_text())
        if path.name.startswith(("replay-m", "wsc-m")) and "no-average" not in path.name:
            of_memory = found.setdefault(run["config"]["memory_per_class"], {})
            of_memory.setdefault(run["config"]["model_name"], []).append(run["curve"])
    return found


def paper_averages(memory, method):
    """The lowest and the highest average accuracy that the paper's tables give for a method at a memory size."""
    tables = json.loads(PAPER.read_text(encoding="utf-8"))["tables"]["cifar100-b10-inc10"]
    values = [tables[name][method][str(memory)]["mean"] for name in ("accuracy", "ablation", "retraining")]
    return [min(values), max(values)]


def pyplot():
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 12, "svg.fonttype": "path", "svg.hashsalt": "figure", "font.family": "DejaVu Sans"}
    return plt


def save(figure, path, shown):
    """Save as SVG, with the data shown as JSON in the file's description."""
    description = json.dumps(shown, sort_keys=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": description}, facecolor="white")
    pyplot().close(figure)


def draw_schedule(path):
    """Write the README's figure: a panel for each memory size, lines over the tasks, averages beside them."""
    plt, shown = pyplot(), curves()
    figure, axes = plt.subplots(1, len(shown), figsize=(8.4, 3.9), sharey=True, layout="constrained")
    for axis, (memory, methods) in zip(axes, sorted(shown.items()), strict=True):
        for method, runs in sorted(methods.items()):
            schedule_line(axis, memory, method, runs)
        axis.set_title(f"{memory} exemplars per class", fontsize=12)
        axis.set_xticks([*range(1, 11, 3), 12], ["1", "4", "7", "10", "average"])
        axis.tick_params(colors=TEXT, labelcolor=OTHER)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(TEXT)
    axes[0].set_ylabel("accuracy, %", color=OTHER)
    axes[0].legend(frameon=False, loc="upper right", fontsize=11)
    figure.supxlabel("task", fontsize=12, color=OTHER)
    save(figure, path, shown)


def schedule_line(axis, memory, method, runs):
    """One method: the mean over seeds with a band from the lowest to the highest, our average and the paper's."""
    color = WSC if method == "wsc" else OTHER
    tasks = range(1, len(runs[0]) + 1)
    by_task = list(zip(*runs, strict=True))
    axis.plot(tasks, list(map(statistics.mean, by_task)), color=color, marker="o", markersize=4, label=NAMES[method])
    if len(runs) > 1:
        axis.fill_between(tasks, list(map(min, by_task)), list(map(max, by_task)), color=color, alpha=0.2, linewidth=0)
    place = 11.7 if method == "wsc" else 12.3
    axis.plot(place, statistics.mean(map(statistics.mean, runs)), "o", color=color, markersize=6)
    label = "the paper's averages" if method == "wsc" else None
    axis.plot([place, place], paper_averages(memory, method), "_", color=color, markersize=14, label=label)


def draw(path):
    """Write the figure of accuracy against training cost."""
    plt, shown = pyplot(), points()
    figure, axes = plt.subplots(1, len(shown), figsize=(6.6, 3.7), sharex=True, sharey=True, layout="constrained")
    for axis, (memory, values) in zip(axes, sorted(shown.items())):
        panel(axis, memory, values)
    axes[0].set_ylabel("average accuracy, %")
    figure.supxlabel("training cost, relative to Replay", fontsize=12, color=OTHER)
    save(figure, path, shown)


def panel(axis, memory, values):
    """One memory size. Labels are to the right of their points, or to the left if the cost is Replay's."""
    labels = {"left": [], "right": []}
    for name, (cost, accuracy) in sorted(values.items(), key=lambda item: item[1][1]):
        side = "left" if cost == 1 and name != "joint" else "right"
        height = accuracy
        for other_cost, other_height in labels[side]:  # move labels of neighbours apart
            if abs(other_cost - cost) < 0.5 and height - other_height < 2.6:
                height = other_height + 2.6
        labels[side].append((cost, height))
        style = {"color": WSC, "fontweight": "bold"} if name == "wsc" else {"color": OTHER}
        axis.plot(cost, accuracy, "o", color=style["color"], markersize=8 if name == "wsc" else 6)
        offset, align = (-0.08, "right") if side == "left" else (0.08, "left")
        axis.annotate(NAMES[name], (cost, accuracy), (cost + offset, height), va="center", ha=align, **style)
    axis.set_title(f"{memory} exemplars per class", fontsize=12)
    axis.set_xlim(0.3, 3.15)
    axis.set_ylim(10, 53)
    axis.set_xticks([1, 1.5, 2, 2.5, 3])
    axis.tick_params(colors=TEXT, labelcolor=OTHER)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(TEXT)
