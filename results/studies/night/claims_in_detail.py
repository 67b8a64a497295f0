"""Write docs/claims_in_detail.md, which :mod:`claims` calls: the numbers behind the claims."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import fill

import pandas as pd
from claim_findings import (  # beside this file
    EIGHT,
    NOT_RUN,
    OTHERS,
    ROOT,
    SHARES,
    THREE,
    Claim,
    Finding,
    after_each_task,
    by_seed,
    finding,
    in_setting,
    interval,
    row_name,
    table_of,
)
from figure import NAMES, SCHEDULE

from pycil_wsc.results.run_table import Row

PAGE = ROOT / "docs" / "claims_in_detail.md"
ESTIMATE = 24.8  # the hours of two cores that the runs of all.json take by `--dry-run --measure`, on an AMD EPYC
WITHOUT_CORRECTION = {"8 %": "+2.0", "16 %": "+2.7", "20 %": "+2.7"}  # of BiC: memory -> points; see the note
WA_ALIGNMENT = ROOT / "results" / "studies" / "night" / "wa_alignment.csv"
NETWORKS = {  # row -> how the page calls its networks
    "replay": "Replay, all images in memory",
    "joint": "full retraining",
    "joint in Replay's schedule": "fresh weights in Replay's schedule",
}
TRAINED = [*NETWORKS]
R = ("replay",)
REPLAY = Claim("Replay's average accuracy", [R], [])
METHODS = tuple(Claim(NAMES[row], [(row,)], [R]) for row in ("wsc", *OTHERS))
OTHER_SETTINGS = (  # (name of the column, setting, fraction of memory)
    ("no memory", "", 0),
    ("4 %", "", 4),
    ("4 %, reservoir", "exemplars=reservoir", 4),
    ("4 %, twenty tasks", "tasks=20", 4),
    ("40 %", "", 40),
    ("40 %, reservoir", "exemplars=reservoir", 40),
    ("40 %, twenty tasks", "tasks=20", 40),
)
OWN_AND_EQUAL = tuple(  # each of the others in its own schedule, and at Replay's operations
    (Claim(NAMES[row], [(row,)], [R], THREE), Claim(NAMES[row], [in_setting((row,), "equal operations")], [R], THREE))
    for row in OTHERS
)
SIZES = tuple(f"{share} %" for share in SHARES)

# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# The claims in detail

This page shows the numbers behind [The paper's claims](claims.md), and how to repeat any table. Run its file of
[the small protocol](paper.md#a-small-protocol), add the runs to the record, and write the pages again:

```bash
python main.py --config exps/studies/night/equal_operations.json --workers 2
python -m pycil_wsc.results runs/night --out results/studies/night/table.csv
python results/studies/night/claims.py
```

± is the half-width of a 95 % interval (Student's t) over five seeds, paired where runs are compared.
[Further tables](../results/studies/night/claims.md) have each memory size, the retain rates and the ranks.

"""
TRAINING = """\
## Why plasticity is not tested

A network that has not learned its training images shows nothing about lost plasticity. So claims about plasticity, full
retraining, gradients and drift are *not tested*. Training accuracy after the last task:

"""
OF_THE_SCHEDULE = """\

With [the paper's schedule](results.md#the-papers-schedule), Replay ends its later tasks at {low:.1f} % or above.

"""
MEASURES = """\
## Measures

- *Average accuracy*, *newest task* and *forgetting* are in points of accuracy.
- *Gradients*: at the start of a task, the cosine between the gradients of new and past data, and the norm of their
  mean.
- *Drift*: the norm of the weights' change over a task. With all images in memory a task has five times as many steps.
- *Training loss*: the loss in the last epoch. Fresh weights are trained in Replay's schedule.
- *Cost*: the floating-point operations of the training passes, divided by Replay's with the same memory.
  [Speed](speed.md) has measured times.

## Settings

- *WSC* takes a plain mean every 2.9 epochs, and keeps the learning rate after the warm-up.
- *BiC* holds out a tenth of the exemplars, at least one of two (`validation`). *FOSTER*'s class weights (`beta1`,
  `beta2`) count each image twenty times. *Continual backprop* has a higher rate and a lower maturity. They were
  [adapted after first runs](../results/studies/night/README.md#options-that-count-images-or-steps).
- *Twenty tasks* have two classes each, 40 in all. The ten tasks have 50.

"""
AGAINST_REPLAY = """\
## Each method against Replay

Each cell has the difference from Replay with the same memory: the paper's, then ours.
"""
OF_WA = """\
**WA gains nothing here.** It scales the head's rows of new classes to the mean norm of the old rows, which are usually
shorter. After these few steps they are longer, so the scaling favours the new classes
([record](../results/studies/night/wa_alignment.csv), `python results/studies/night/wa_alignment.py`):

"""
IN_OTHER_SETTINGS = """\
## In other settings

Average accuracy in percent: without exemplars, with [a kind of reservoir](claims.md#how-far-to-trust-it) instead of
herding, and in twenty tasks. Without exemplars, Finetune, which trains on the new classes alone, is ahead of all
others. The paper's runs without exemplars probably had [one per class](paper.md#in-the-papers-protocol).
"""
AT_REPLAYS_OPERATIONS = """\
## At Replay's operations

Each cell has the difference from Replay with the same memory. Methods train with their own schedules, whose cost
relative to Replay is in brackets, or with shorter ones that cost as much as Replay's
(`exps/studies/night/equal_operations.json`).
"""


def page(found: Sequence[Row]) -> str:
    """The page docs/claims_in_detail.md."""
    table = table_of(found)
    parts = (
        INTRODUCTION + training(table) + MEASURES + AGAINST_REPLAY + of_wa(table) + of_bic(found) + "\nAll methods:\n",
        markdown(("method", *SIZES), [by_share(finding(each, table)) for each in (REPLAY, *METHODS)]),
        IN_OTHER_SETTINGS,
        markdown(("method", *(name for name, _, _ in OTHER_SETTINGS)), in_other_settings(table)),
        AT_REPLAYS_OPERATIONS,
        markdown(
            ("method", *(f"{share} %, {name}" for share in THREE for name in ("own schedule", "equal operations"))),
            own_and_equal(table),
        ),
        "## Hours\n",
        hours(found) + "\n",
    )
    return "\n".join(parts)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def measured(claim: Claim, seeds: pd.Series) -> str:
    """The mean with the half-width of its interval; differences have their sign."""
    mean, half = interval(seeds)
    return f"{mean:{sign(claim)}.2f} ± {half:.2f}"


def sign(claim: Claim) -> str:
    """The format's sign: that of a difference is always shown."""
    return "+" if claim.minus else ""


def by_share(each: Finding) -> tuple[str, ...]:
    """The paper's number and ours at each fraction of memory."""
    cells = [each.claim.text]
    for share in SHARES:
        texts = []
        if share in each.paper and each.paper[share].notna().all():
            texts.append(f"{each.paper[share].iloc[0]:{sign(each.claim)}.2f}")
        if share in each.ours and each.ours[share].count() > 1:
            texts.append(measured(each.claim, each.ours[share].dropna()))
        cells.append("; ".join(texts))
    return tuple(cells)


def training(table: pd.DataFrame) -> str:
    """The training accuracies that the networks reach, here and with the paper's schedule."""
    trained = table.loc[table["share"].eq(100)].groupby("row")["trained_last"].mean().reindex(TRAINED)
    if trained.isna().any():
        return ""
    rows = [(NETWORKS[name], f"{accuracy:.0f}") for name, accuracy in trained.items()]
    full = []
    for path in SCHEDULE.glob("replay-m*.json"):
        _, *later = json.loads(path.read_text(encoding="utf-8"))["train_accuracy"]
        full += [curve[-1] for curve in later]
    return f"{TRAINING}{markdown(('network', 'training accuracy, %'), rows)}{OF_THE_SCHEDULE.format(low=min(full))}"


def of_wa(table: pd.DataFrame) -> str:
    """What WA's scaling does: the lengths of the head's rows, and the accuracy without it."""
    wide, rows = by_seed(table, "average"), []
    runs = pd.read_csv(WA_ALIGNMENT).assign(ratio=lambda lines: lines["old_norm"] / lines["new_norm"])
    for memory, lines in runs.groupby("memory_per_class"):
        share = 4 * int(str(memory))
        if not {f"wa@{share}", f"replay@{share}"} <= set(wide):
            return ""
        without = lines.groupby("seed")["accuracy"].mean()
        gains = [without - wide[f"{name}@{share}"] for name in ("wa", "replay")]
        over_wa, over_replay = (f"{mean:+.2f} ± {half:.2f}" for mean, half in map(interval, gains))
        rows.append((f"{share} %", f"×{lines['ratio'].mean():.2f}", over_wa, over_replay))
    header = ("memory", "norm ratio, old / new rows", "without the scaling: gain over WA", "gain over Replay")
    return f"\n{OF_WA}{markdown(header, rows)}"


def of_bic(found: Sequence[Row]) -> str:
    """What BiC's bias correction does to the newest classes, where it has images."""
    newest = []
    for run in found:
        if row_name(run) == "bic" and run["memory"] > 1:
            newest += after_each_task(run, "newest")[1:]
    if not newest:
        return ""
    lost = 100 * sum(accuracy == 0 for accuracy in newest) / len(newest)
    text = (
        "**BiC's bias correction does harm here.** It is learned from one or two held-out images of each class. "
        "With two or more exemplars per class, the correction often drives accuracy on the newest classes to zero "
        f"({lost:.0f} % of later tasks). Gain of BiC [without the correction](../results/studies/night/README.md):"
    )
    gains = markdown(("memory", *WITHOUT_CORRECTION), [("points", *WITHOUT_CORRECTION.values())])
    return f"\n{fill(text, 120)}\n\n{gains}"


def in_other_settings(table: pd.DataFrame) -> list[list[str]]:
    """A row per method of its average accuracy in each of the ``OTHER_SETTINGS`` that it was run in."""
    rows = []
    for row in ("finetune", *EIGHT):
        cells = []
        for _, setting, share in OTHER_SETTINGS:
            name = f"{row} {setting}".rstrip()
            found = at(share, Claim(name, [(name,)], [], (share,)), table)
            cells.append("" if found == NOT_RUN and row == "finetune" else found)
        rows.append([NAMES[row], *cells])
    return rows


def own_and_equal(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the table at Replay's operations."""
    rows = []
    for own, equal in OWN_AND_EQUAL:
        cost = finding(replace(own, measure="cost", minus=[]), table).ours.mean()
        cells = [(f"{at(share, own, table)} (×{cost[share]:.1f})", at(share, equal, table)) for share in THREE]
        rows.append([own.text, *(cell for pair in cells for cell in pair)])
    return rows


def at(share: int, claim: Claim, table: pd.DataFrame) -> str:
    """Our difference at one fraction of memory."""
    seeds = finding(claim, table).ours[share].dropna()
    return measured(claim, seeds) if len(seeds) > 1 else NOT_RUN


def hours(found: Sequence[Row]) -> str:
    """What the runs of ``all.json`` took, and what they were estimated to take."""
    of_all = [run for run in found if not run.get("operations_like")]
    spent = sum(run["seconds"] for run in of_all) / 3600 / 2
    return (
        f"{len(of_all):,} runs, each on one core, took {spent:.1f} hours of two cores by the clock, beside other work. "
        f"`--dry-run --measure` estimates {ESTIMATE:g} hours for all runs of `exps/studies/night/all.json`."
    )
