"""The table of docs/wsc.md on averages: gains over Replay on held-out images, of the runs of averaging.json in
exps/studies/night.

python docs/scripts/generate.py
"""

import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pycil_wsc.report.stats import reach  # noqa: E402
from pycil_wsc.results.run_table import read  # noqa: E402

RUNS = ROOT / "results" / "studies" / "night" / "averaging.csv"
IMAGES = 25  # of each class
SETTINGS = {  # the rows, by `wsc.average_count` and `wsc.average_lr`
    ("late", 0.1): "late samples weigh more, constant rate (the default)",
    ("since_reset", 0.1): "plain mean every 5 of 70 epochs, constant rate (`exps/wsc.json`)",
    ("late", None): "late samples weigh more, step decay",
    ("absolute", None): "the paper's text, step decay (`exps/paper/wsc_literal.json`)",
}
DEFAULT, PLAIN = list(SETTINGS.values())[:2]
REPLAY = "replay"


def averages() -> pd.DataFrame:
    """The average accuracy on held-out images: a line for each number of epochs, size of memory and seed, and a column
    for each row of the table.
    """
    found = []
    for run in read(RUNS) if RUNS.exists() else ():
        setting = run.get("wsc.average_count"), run.get("wsc.average_lr")
        name = REPLAY if run["method"] == REPLAY else SETTINGS[setting]
        share = 100 * run["memory"] / IMAGES
        found.append((run["epochs"], int(share), run["seed"], name, run["average"]))
    table = pd.DataFrame(found, columns=["epochs", "share", "seed", "row", "average"])
    return table.pivot(index=["epochs", "share", "seed"], columns="row", values="average")


def difference(wide: pd.DataFrame, row: str, other: str) -> str:
    """The mean difference of two rows over equal seeds, with the half-width of its 95 % interval; "" without runs."""
    seeds = (wide[row] - wide[other]).dropna()
    if len(seeds) < 2:
        return ""
    half = reach(len(seeds) - 1) * seeds.sem()
    text = f"{seeds.mean():+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(seeds.mean()) > half else text


def sentence() -> str:
    """The plain mean against the default with each number of epochs, on average over the memory sizes that both have.

    Empty without records.
    """
    table = averages()
    if table.empty:
        return ""
    shares = {epochs: set(part.index.get_level_values("share")) for epochs, part in table.groupby(level="epochs")}
    common = sorted(set.intersection(*shares.values()))
    equal = table.loc[table.index.isin(common, level="share")]
    gains = []
    for epochs, part in equal.groupby(level="epochs"):
        over_sizes = pd.DataFrame(part.groupby(level="seed").mean(skipna=False))
        gains.append(f"{difference(over_sizes, PLAIN, DEFAULT)} with {epochs} epochs")
    named = " and ".join(map(str, common))
    return f"On average over {named} % of the images, the plain mean is above the default by {' and by '.join(gains)}."


def rows() -> list[tuple[str, ...]]:
    """The table's lines, the header first; empty without records."""
    table = averages()
    if table.empty:
        return []
    protocols = sorted({(epochs, share) for epochs, share, _ in table.index})
    groups = {protocol: table.loc[protocol] for protocol in protocols}
    header = ("WSC against Replay", *(f"{share} %, {epochs} epochs" for epochs, share in protocols))
    found: list[tuple[str, ...]] = [header]
    for row in SETTINGS.values():
        found.append((row, *(difference(group, row, REPLAY) for group in groups.values())))
    between = (difference(group, DEFAULT, PLAIN) for group in groups.values())
    return [*found, ("*the first against the second*", *between)]
