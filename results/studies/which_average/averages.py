"""The tables of docs/wsc.md on the weights of an average's samples, of results/studies/which_average.

python docs/scripts/generate.py
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[3]))

from pycil_wsc.report.stats import reach
from pycil_wsc.results.run_table import read

STUDY = Path(__file__).parent
POWERS = (0, 1, 3, 8, 32)
CHOSEN, BEFORE = 3, 32  # the default, and that of earlier development versions
SEEDS = [str(seed) for seed in range(12)]  # columns of the digits' table


def images() -> pd.DataFrame:
    """Average accuracies on held-out images of CIFAR-100: a line a run, by epochs, memory, seed; a column a power."""
    found = {}
    for run in read(STUDY / "table.csv"):
        found[run["epochs"], run["memory"], run["seed"]] = [run[f"power_{power}_curve"] for power in POWERS]
    index = pd.MultiIndex.from_tuples(found, names=["epochs", "memory", "seed"])
    return pd.DataFrame(list(found.values()), index=index, columns=list(POWERS)).sort_index()


def digits() -> pd.DataFrame:
    """Gains over Replay on held-out digits, means over seeds: a line for each number of epochs and loop."""
    table = pd.read_csv(STUDY / "digits_validation.csv")
    table["mean"] = table[SEEDS].mean(axis=1)
    wide = table.pivot(index=["epochs", "loop"], columns="method", values="mean")
    names = {power: f"late {power}" if power else "mean" for power in POWERS}
    return pd.DataFrame({power: wide[name] - wide["replay"] for power, name in names.items()})


def losses(table: pd.DataFrame) -> pd.DataFrame:
    """What each power loses against the best one of the line."""
    return (-table).add(table.max(axis=1), axis=0)


def of_images() -> list[tuple[str, ...]]:
    """The table of CIFAR-100, the header first: means over seeds, and the chosen power against the one before it."""
    powers = (f"p = {POWERS[0]}", *map(str, POWERS[1:]))
    lines: list[tuple[str, ...]] = [("epochs a task", "memory, %", *powers, f"{CHOSEN} against {BEFORE}", "seeds")]
    table = images()
    for epochs, memory in dict.fromkeys((epochs, memory) for epochs, memory, _ in table.index):
        runs = table.loc[epochs, memory]
        means = (f"{runs[power].mean():.2f}" for power in POWERS)
        gain = runs[CHOSEN] - runs[BEFORE]
        half = f" ± {reach(len(gain) - 1) * gain.sem():.2f}" if len(gain) > 1 else ""
        lines.append((str(epochs), str(memory), *means, f"{gain.mean():+.2f}{half}", str(len(gain))))
    return lines


def of_digits() -> list[tuple[str, ...]]:
    """The table of the digits, the header first: the mean gain over Replay of seven loops, and the least one."""
    powers = (f"p = {POWERS[0]}", *map(str, POWERS[1:]))
    lines: list[tuple[str, ...]] = [("epochs a task", *powers)]
    for epochs, gains in digits().groupby(level="epochs"):
        lines.append((str(epochs), *(f"{gains[power].mean():+.2f} ({gains[power].min():+.2f})" for power in POWERS)))
    return lines


def worst() -> list[tuple[str, ...]]:
    """The largest loss of each power against the best one of a setting, the header first."""
    settings = pd.DataFrame(images().groupby(level=["epochs", "memory"]).mean())
    lines: list[tuple[str, ...]] = [("largest loss", f"p = {POWERS[0]}", *map(str, POWERS[1:]))]
    for name, table in ("seven loops on digits", digits()), ("CIFAR-100 at 16 pixels", settings):
        largest = losses(table).max()
        lines.append((name, *(f"{largest[power]:.2f}" for power in POWERS)))
    return lines
