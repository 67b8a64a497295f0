"""The study for plentiful memory: each method's value, chosen by its trials; the table and figure of docs/abundant.md.

python results/studies/abundant/abundant.py    # writes the chosen values into exps/studies/abundant.json
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "scripts"))

from over_seeds import ROOT, Row, difference, grouped, kept_by_holm, recorded

from pycil_wsc.report.texts import method_name

TRIALS, STUDY = ROOT / "exps" / "studies" / "abundant_tune.json", ROOT / "exps" / "studies" / "abundant.json"
SIZES = {1: "4 %", 10: "40 %", 25: "100 %"}  # exemplars per class, of 25 images
RESETS = {"shrink_perturb": "Shrink and perturb", "continual_backprop": "Continual backprop"}
WITHOUT_MEMORY = ("LwF", "EWC", "SI", "MAS")  # far below the others: not in the figure
DEFAULT_DECAY = "Continual backprop (no unit replaced)"  # that is, Replay with the default weight decay
NEAR = ("WSC", "WiSE-FT", "CoFiMA")  # methods with the default weight decay, and near Replay
MIS_SCALED = ("EMA", "CLS-ER", "ReDo", "Continual backprop", "DER++")  # not shown: the page says why
MEASURES = ("train_flops", "average")
FIGURE = "![Difference from Replay of each method at Replay's operations, at three memory sizes](images/abundant.svg)"


class Difference(NamedTuple):
    """The mean difference from Replay over equal seeds, how far its 95 % interval reaches to each side, and the
    probability of one as large by chance.
    """

    mean: float
    reach: float
    chance: float

    def __str__(self) -> str:
        return difference(self.mean, self.reach)


def method(keys: Mapping[str, Any]) -> str:
    """The name of a row, from the row of a run or of an entry of ``runs``."""
    learner = keys["method"] if "method" in keys else keys["model_name"]
    name = method_name(learner)
    if learner == "wsc":
        name = RESETS.get(keys.get("wsc.reset", "blend"), name)
    return f"{name} (reservoir)" if keys.get("exemplars") == "reservoir" else name


# ---- the trials ------------------------------------------------------------------------------------------------------


def trials() -> dict[str, tuple[str, dict[Any, float]]]:
    """{method: (its key, {value: accuracy on held-out training images})}, in the order of the study."""
    entries, found = json.loads(TRIALS.read_text())["runs"], {}
    for entry in entries:
        (key,) = (name for name, value in entry.items() if isinstance(value, list))
        found[method(entry)] = key, {}
    for run in recorded("abundant", "trials"):
        key, values = found[method(run)]
        values[run.get(key)] = run["average"]
    return found


def choose() -> None:
    """Write the value of each method's best trial into the study's file."""
    text, tried = STUDY.read_text(), trials()
    for line in text.splitlines():
        if '"model_name"' in line:
            entry = json.loads(line.strip().rstrip(","))
            key, values = tried[method(entry)]
            best = max(values, key=lambda value: values[value], default=entry[key])
            text = text.replace(json.dumps(entry), json.dumps(entry | {key: best}))
    STUDY.write_text(text)


# ---- the study -------------------------------------------------------------------------------------------------------


def runs() -> dict[str, dict[int, dict[int, Row]]]:
    """{method: {exemplars per class: {seed: run}}}; a method without memory is at every size."""
    methods = grouped("abundant", row_of)
    return {name: dict.fromkeys(SIZES, sizes[0]) if 0 in sizes else sizes for name, sizes in methods.items()}


def row_of(run: Row) -> str:
    """The name of the run's row, which says so if its rule has replaced no unit."""
    inert = run.get("units_replaced") == 0  # the mean over the tasks
    return method(run) + (" (no unit replaced)" if inert else "")


def is_mis_scaled(row: str) -> bool:
    """Whether a row's method is not shown."""
    return row.partition(" (")[0] in MIS_SCALED


def differences(baseline: str = "Replay") -> dict[str, dict[int, Difference]]:
    """{method: {exemplars per class: its difference from ``baseline``}}, the best at full memory first.

    Without the methods that are mis-scaled here.
    """
    from scipy.stats import ttest_1samp

    every = runs()
    replay, found = every.pop(baseline, {}), {}
    for name, sizes in every.items():
        if is_mis_scaled(name):
            continue
        for size, mine in sizes.items():
            pairs = [mine[seed]["average"] - replay[size][seed]["average"] for seed in mine if seed in replay[size]]
            if len(pairs) > 1:
                test = ttest_1samp(pairs, 0)
                low, high = test.confidence_interval(0.95)
                chance = test.pvalue  # pyright: ignore[reportAttributeAccessIssue]
                difference = Difference(statistics.mean(pairs), (high - low) / 2, chance)
                found.setdefault(name, {})[size] = difference
    return dict(sorted(found.items(), key=lambda item: -item[1][25].mean if 25 in item[1] else 1e9))


def rows_at_equal_decay() -> list[tuple[str, ...]]:
    """The header and the rows of the page's second table; empty without records."""
    found = differences(DEFAULT_DECAY)
    header = ("against Replay with `weight_decay` 0.0002", *SIZES.values())
    return [header, *((name, *(str(found[name][size]) for size in SIZES)) for name in NEAR)] if found else []


def over_replay(mine: dict[int, dict[int, Row]], replay: dict[int, dict[int, Row]]) -> float:
    """The operations of a method's runs over those of Replay's, at all sizes together."""
    total = [0, 0]
    for size, seeds in mine.items():
        for seed, run in seeds.items():
            total[0] += run["train_flops"]
            total[1] += replay[size][seed]["train_flops"]
    return total[0] / total[1]


def rows() -> list[tuple[str, ...]]:
    """The header and the rows of the page's table; empty without records."""
    found = differences()
    if not found:
        return []
    chosen = {name: f"`{key}` {json.dumps(value)}" for name, key, value in settings()}
    every = runs()
    replay = every["Replay"]
    means = [f"{statistics.mean(run['average'] for run in replay[size].values()):.2f}" for size in SIZES]
    lines = [("method", "chosen", *SIZES.values(), "operations"), ("Replay", chosen["Replay"], *means, "1.00")]
    for name, sizes in found.items():
        cells = [str(sizes[size]) if size in sizes else "–" for size in SIZES]
        seeds = min(len(every[name][size]) for size in sizes)
        fewer = "" if seeds == len(replay[25]) else f" ({seeds} seeds)"
        lines.append((name + fewer, chosen[name], *cells, f"{over_replay(every[name], replay):.2f}"))
    return lines


def settings() -> Iterator[tuple[str, str, Any]]:
    """(method, its key, the value in the study's file)."""
    keys = {name: key for name, (key, _) in trials().items()}
    entries = {method(entry): entry for entry in json.loads(STUDY.read_text())["runs"]}
    for name, sizes in runs().items():
        run = next(iter(next(iter(sizes.values())).values()))
        key = keys[method(run)]
        yield name, key, entries[method(run)][key]


def sentence() -> str:
    """What is left of the table after Holm's correction, and how well Replay has learned its images."""
    of_table = [each for sizes in differences().values() for each in sizes.values()]
    kept = kept_by_holm({place: each.chance for place, each in enumerate(of_table)})
    left = [of_table[place] for place in kept]
    gains = sum(each.mean > 0 for each in left)
    ends = [run["trained_10"] for run in runs()["Replay"][25].values()]
    return (
        f"Of the {len(of_table)} differences in this table, {len(left) - gains} losses and {gains or 'no'} gains are "
        "significant after correction for multiple comparisons (Holm). "
        f"With all images in memory, Replay ends its last task at a training accuracy of {statistics.mean(ends):.0f} %."
    )


def points() -> dict[int, dict[str, Any]]:
    """{exemplars per class: operations and accuracy of Replay, and each method's difference}: what the figure shows."""
    every, found = runs(), differences()
    shown: dict[int, dict[str, Any]] = {}
    for size, seeds in every["Replay"].items():
        means = {measure: statistics.mean(run[measure] for run in seeds.values()) for measure in MEASURES}
        with_memory = {
            name: sizes[size] for name, sizes in found.items() if name not in WITHOUT_MEMORY and size in sizes
        }
        shown[size] = means | {"differences": with_memory}
    return shown


def draw(path: Path) -> None:
    """Write the figure: a panel for each memory size, with the differences from Replay at its operations."""
    from figure import OTHER, TEXT, WSC, pyplot, save

    plt, shown = pyplot(), points()
    names = list(shown[25]["differences"])[::-1]
    figure, axes = plt.subplots(1, len(shown), figsize=(9.6, 5.4), sharex=True, sharey=True, layout="constrained")
    for axis, (size, panel) in zip(axes, sorted(shown.items()), strict=True):
        for name, (mean, reach, _) in panel["differences"].items():
            color = WSC if name == "WSC" else OTHER
            axis.errorbar(mean, names.index(name), xerr=reach, color=color, marker="o", markersize=5, capsize=2)
        axis.axvline(0, color=TEXT, linewidth=0.8)
        operations = panel["train_flops"] / 1e12
        axis.set_title(f"{SIZES[size]}\nReplay {panel['average']:.1f} %, {operations:.2g}·10¹² operations", fontsize=10)
        axis.tick_params(colors=TEXT, labelcolor=OTHER)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    figure.supxlabel("average accuracy minus Replay's, points, with 95 % intervals", fontsize=12, color=OTHER)
    save(figure, path, shown)


if __name__ == "__main__":
    choose()
