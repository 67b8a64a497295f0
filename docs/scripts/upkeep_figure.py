"""The figure of the page on a classifier kept up to date: how often calibration, gate and test of shift err."""

import json
import statistics
from pathlib import Path

from figure import OTHER, TEXT, WSC, pyplot, save

RECORDS = Path(__file__).parent.parent.parent / "results" / "benchmarks"
UPDATES = {"more photographs": "more images,\nnew class", "new class only": "new class\nalone"}
UPDATES |= {"wrong labels": "wrong\nnames"}
SHIFTS = {"none": "no shift", "noise of 15 of 255": "noise", "brightness x 0.8": "0.8 of the\nbrightness"}


def errors():
    """The numbers of the three panels, with their numbers of draws."""
    upkeep = json.loads((RECORDS / "upkeep" / "upkeep-cpu.json").read_text())
    gate = json.loads((RECORDS / "gate" / "gate-cpu.json").read_text())
    calibration = {name: upkeep["calibration"][name] for name in ("before", "after", "draws")}
    kept = {}
    for update in UPDATES:
        seeds = gate["updates"][update].values()
        draws = gate["settings"]["draws"] * len(seeds)
        rejected = sum(seed["rejected"]["default"] for seed in seeds)
        change = -statistics.mean(seed["drop"] for seed in seeds)
        kept[update] = {"kept": draws - rejected, "draws": draws, "change": change}
    return {"calibration": calibration, "gate": kept, "shift": {name: upkeep["shift"][name] for name in SHIFTS}}


def draw(path):
    """Write the figure: a panel for each of calibration, gate and shift."""
    plt, shown = pyplot(), errors()
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 3.5), layout="constrained", width_ratios=[0.7, 1, 1])
    draw_calibration(axes[0], shown["calibration"])
    draw_gate(axes[1], shown["gate"])
    draw_shift(axes[2], shown["shift"])
    for axis in axes:
        axis.tick_params(colors=TEXT, labelcolor=OTHER, labelsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(TEXT)
    save(figure, path, shown)


def draw_calibration(axis, errors):
    """The median and the range of the calibration error."""
    for place, (name, color) in enumerate((("before", OTHER), ("after", WSC))):
        found = errors[name]
        axis.plot([place, place], [found["min"], found["max"]], color=color, linewidth=2)
        axis.plot(place, found["median"], "o", color=color, markersize=8)
        axis.annotate(f"{found['median']:.1f}", (place + 0.12, found["median"]), va="center", color=color)
    axis.set_title(f"calibration, {errors['draws']} draws", fontsize=12)
    axis.set_ylabel("calibration error, %", color=OTHER, fontsize=11)
    axis.set_xticks([0, 1], ["before", "after"])
    axis.set_xlim(-0.5, 1.6)
    axis.set_ylim(0)


def draw_gate(axis, updates):
    """How often each update was kept."""
    for place, update in enumerate(updates.values()):
        share = 100 * update["kept"] / update["draws"]
        axis.bar(place, share, 0.6, color=WSC)
        label = f"{update['kept']} of {update['draws']}\n({update['change']:+.1f} points)"
        axis.annotate(label, (place, share + 2), ha="center", va="bottom", color=OTHER, fontsize=10)
    axis.set_title("gate: updates that are kept", fontsize=12)
    axis.set_ylabel("% of the draws", color=OTHER, fontsize=11)
    axis.set_xticks(range(len(updates)), [UPDATES[name] for name in updates])
    axis.set_ylim(0, 135)
    axis.set_yticks([0, 50, 100])


def draw_shift(axis, shifts):
    """How often there was an alarm, at both levels."""
    for beside, (level, color) in ((-0.18, ("p <= 0.01", WSC)), (0.18, ("p <= 0.05", OTHER))):
        alarms = [shift[level] for shift in shifts.values()]
        places = [place + beside for place in range(len(alarms))]
        axis.bar(places, alarms, 0.34, color=color, label=f"level {float(level.split()[-1]):.0%}")
        for place, number in zip(places, alarms, strict=True):
            axis.annotate(str(number), (place, number + 2), ha="center", va="bottom", color=color, fontsize=10)
    (draws,) = {shift["draws"] for shift in shifts.values()}
    axis.set_title(f"shift: alarms in {draws} draws", fontsize=12)
    axis.set_xticks(range(len(shifts)), [SHIFTS[name] for name in shifts])
    axis.set_ylim(0, 130)
    axis.set_yticks([0, 50, 100])
    axis.legend(frameon=False, loc="upper left", fontsize=10)
