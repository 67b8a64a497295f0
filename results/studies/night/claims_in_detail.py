"""Write docs/claims_in_detail.md, which :mod:`claims` calls: the numbers behind the claims."""

import json
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill

import pandas as pd
from figure import NAMES, SCHEDULE
from findings import (
    CONVERGED,
    NOT_RUN,
    SHARES,
    VERDICTS,
    Claim,
    Finding,
    by_chance,
    by_seed,
    finding,
    measured,
    sign,
    summaries,
)
from night_runs import (  # beside this file
    EIGHT,
    OTHERS,
    SEEDS,
    THREE,
    first_tasks_apart,
    in_setting,
    row_name,
    table_of,
)
from over_seeds import ROOT, after_each_task, estimate, markdown

from pycil_wsc.results.run_table import Row

PAGE = ROOT / "docs" / "claims_in_detail.md"
ESTIMATE = 24.8  # the hours of two cores that the runs of all.json take by `--dry-run --measure`, on an AMD EPYC
WITHOUT_CORRECTION = {"8 %": "+2.0", "16 %": "+2.7", "20 %": "+2.7"}  # of BiC: memory -> points; see the note
WA_ALIGNMENT = ROOT / "results" / "studies" / "night" / "wa_alignment.csv"
TRAINED = ["replay", "joint", "joint in Replay's schedule"]  # the rows whose training accuracy the page begins with
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

{training}

This page shows all claims in this protocol. To repeat a table, run its [file](paper.md#a-small-protocol):

```bash
python main.py --config exps/studies/night/equal_operations.json --workers 2
python -m pycil_wsc.results runs/night --out results/studies/night/table.csv
python results/studies/night/claims.py
```

± is the half-width of a 95 % interval (Student's t) over five seeds, paired where runs are compared.
[Further tables](../results/studies/night/claims.md) have each memory size, the retain rates and the ranks.

"""
TRAINING = (
    "In [the small protocol](paper.md#a-small-protocol), networks are not fully trained. After the last task, training "
    "accuracy is {replay:.0f} % for Replay with all images in memory, {joint:.0f} % for full retraining, and "
    "{fresh:.0f} % for fresh weights in Replay's schedule. With [the paper's schedule]"
    "(results.md#the-papers-schedule), Replay ends its later tasks at {low:.1f} % or above. So these runs show nothing "
    "about lost plasticity; [networks that fit their data](claims.md) do."
)
ALL_CLAIMS = """\
## All claims

"""
READING = """\

[How to read the table](claims.md#how-to-read-the-tables). Holm's correction is for {count} tests. *(added)*: the claim
was added after some of its results were known. *Not tested here*: the runs cannot decide the claim, whatever the
difference, by one of four rules:

- *training*: the claim is about plasticity or full retraining, and training accuracy is below {converged:.0f} %.
- *schedule*: the better method trains longer and the other is undertrained, so the schedule alone may explain the
  difference.
- *reset*: the claim compares ways to reset. Here the reset itself gains nothing, and no difference from 0 is visible.
- *classes*: the runs learn different numbers of classes.

"""
CAUTIONS = """\
## How far to trust it

- *The best* of several methods is chosen by the test accuracies that the claim compares. This favours it.
- "Reservoir sampling" drew a task's exemplars from all of its images and never replaced them. This is not
  [reservoir sampling](methods.md#reservoirs) in the strict sense. With one exemplar per class, about a third of the
  classes had none.
"""
MEASURES = """\
## Measures

- *Gradients*: at the start of a task, the cosine between the gradients of new and past data, and the norm of their
  mean.
- *Drift*: the norm of the weights' change over a task.
- *Training loss*: that of the last epoch. Fresh weights have Replay's schedule.

## Settings

- *WSC* takes a plain mean every 2.9 epochs, and keeps the learning rate after the warm-up.
- *BiC* holds out a tenth of the exemplars, at least one of two (`validation`). *FOSTER*'s class weights (`beta1`,
  `beta2`) count each image twenty times. *Continual backprop* has a higher rate and a lower maturity. All were
  [adapted after first runs](../results/studies/night/README.md#options-that-count-images-or-steps).
- *Twenty tasks* have 40 classes, ten tasks 50.

"""
AGAINST_REPLAY = """\
## Each method against Replay

![Gain of each method over Replay, against the fraction of images in memory, here and in the paper](images/claims.svg)

Each cell has the difference from Replay with the same memory: the paper's, then ours.
"""
OF_WA = """\
**WA gains nothing here.** It scales the head's rows of new classes to the mean norm of the old rows, which are usually
shorter. After these few steps they are longer, so the scaling favours the new classes
([record](../results/studies/night/wa_alignment.csv), `python results/studies/night/wa_alignment.py`):

"""
IN_OTHER_SETTINGS = """\
## In other settings

Average accuracy in percent: without exemplars, with [a kind of reservoir](#how-far-to-trust-it) instead of
herding, and in twenty tasks. Without exemplars, Finetune, which trains on the new classes alone, is ahead of all
others. The paper's runs without exemplars probably had [one per class](paper.md#in-the-papers-protocol).
"""
AT_REPLAYS_OPERATIONS = """\
## At Replay's operations

Each cell has the difference from Replay with the same memory. Methods train with their own schedules, whose cost
relative to Replay is in brackets, or with shorter ones that cost as much as Replay's
(`exps/studies/night/equal_operations.json`).
"""


def page(runs: Sequence[Row], findings: Sequence[Finding]) -> str:
    """The page docs/claims_in_detail.md."""
    table = table_of(runs)
    header, *of_claims = summaries(findings, SEEDS)
    count, _ = by_chance(findings)
    verdicts = ALL_CLAIMS + markdown(header, of_claims) + READING.format(count=count, converged=CONVERGED)
    introduction = INTRODUCTION.format(training=training(table)) + verdicts + CAUTIONS + cautions(findings, table)
    parts = (
        f"{introduction}\n{MEASURES}{AGAINST_REPLAY}{of_wa(table)}{of_bic(runs)}\nAll methods:\n",
        markdown(("method", *SIZES), [by_share(finding(each, table)) for each in (REPLAY, *METHODS)]),
        IN_OTHER_SETTINGS,
        markdown(("method", *(name for name, _, _ in OTHER_SETTINGS)), in_other_settings(table)),
        AT_REPLAYS_OPERATIONS,
        markdown(
            ("method", *(f"{share} %, {name}" for share in THREE for name in ("own schedule", "equal operations"))),
            own_and_equal(table),
        ),
        "## Hours\n",
        hours(runs) + "\n",
    )
    return "\n".join(parts)


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
    accuracies = table.loc[table["share"].eq(100)].groupby("row")["trained_last"].mean()
    replay, joint, fresh = (float(accuracies[row]) for row in TRAINED)
    full = []
    for path in SCHEDULE.glob("replay-m*.json"):
        _, *later = json.loads(path.read_text(encoding="utf-8"))["train_accuracy"]
        full += [curve[-1] for curve in later]
    return fill(TRAINING.format(replay=replay, joint=joint, fresh=fresh, low=min(full)), 120, break_on_hyphens=False)


def cautions(findings: Sequence[Finding], table: pd.DataFrame) -> str:
    """What the runs themselves say about how far to trust the verdicts, in a list."""
    changed = []
    for each in findings:
        if each.claim.measure == "average" and each.verdict in VERDICTS[:3]:
            alone = finding(replace(each.claim, measure="later"), table)
            if alone.outcome != each.verdict:
                changed.append(f"{each.claim.text} ({measured(alone.claim, alone.seeds)}, {alone.outcome})")
    items = [
        "- The runs come from several machines and two versions of torch, which round differently. So the accuracy "
        f"after the first task differs by up to {first_tasks_apart(table):.1f} points between runs of one seed.",
        "- Over the later tasks alone, "
        + (f"these verdicts change: {'; '.join(changed)}." if changed else "all verdicts are the same."),
    ]
    return "".join(fill(item, 120, subsequent_indent="  ") + "\n" for item in items)


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
        over_wa, over_replay = (estimate(gain, "+") for gain in gains)
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
        f"{len(of_all):,} runs, each on one core, took {spent:.1f} hours of two cores by the clock. "
        f"`--dry-run --measure` estimates {ESTIMATE:g} hours for all runs of `exps/studies/night/all.json`."
    )
