"""Write docs/claims.md and its figure: each claim of the paper beside the runs of exps/night, from their record.

python docs/scripts/claims.py
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from textwrap import fill

import pandas as pd
from claim_findings import (  # beside this file, as is
    DISTILLING,
    EXPANDING,
    NOT_RUN,
    ROOT,
    RUNS,
    SEEDS,
    SHARES,
    VERDICTS,
    Claim,
    Finding,
    Group,
    by_chance,
    by_seed,
    correlation,
    finding,
    first_tasks_apart,
    interval,
    recorded,
    table_of,
)
from claims_figure import IMAGE, draw
from figure import NAMES

from pycil_wsc.results import Record

PAGE = ROOT / "docs" / "claims.md"
MARGIN = 1.0  # points of accuracy that count as no difference
ESTIMATE = 1015, 24.8  # all runs, and the hours of two cores that they take by `--dry-run --measure`, on an AMD EPYC
THREE = (4, 40, 100)  # of the shares of memory
OTHERS = (*DISTILLING, *EXPANDING)
EIGHT = ("replay", "wsc", *OTHERS)


def with_(rows: Group, setting: str) -> Group:
    """The rows of the same methods in another setting."""
    return tuple(f"{row} {setting}" for row in rows)


RULES = {
    "revert": "reverting",
    "random": "random values",
    "shrink_perturb": "shrinking and perturbing",
    "continual_backprop": "continual backprop",
}
NEARLY, NO_WORSE = (-MARGIN, MARGIN), (-MARGIN, inf)
R, W = ("replay",), ("wsc",)
CLAIMS = (
    Claim("Replay is behind the other methods with a small memory", [OTHERS], [R], (4,)),
    Claim("Replay is behind distillation with a small memory", [DISTILLING], [R], (4,)),
    Claim("Replay is ahead of distillation with a large memory", [R], [DISTILLING], (80, 100)),
    Claim(
        "Replay is ahead of the best method that distils, with a large memory", [R], [DISTILLING], (80, 100), best=True
    ),
    Claim("Replay is ahead of expansion with a large memory", [R], [EXPANDING], (80, 100)),
    Claim("WSC is ahead of Replay", [W], [R]),
    Claim("WSC is ahead of the best method that does not expand", [W], [(*R, *DISTILLING)], SHARES[3:], best=True),
    Claim("WSC costs what Replay does", [W], [], accepts=(0.9, 1.1), measure="cost", stated="the same"),
    Claim(
        "Expansion costs three times what Replay does, or more",
        [EXPANDING],
        [],
        accepts=(3, inf),
        measure="cost",
        stated="3 to 5",
    ),
    Claim("Averaging alone is ahead of Replay", [("wsc reset=none",)], [R], study="ablation"),
    Claim("WSC is ahead of averaging alone", [W], [("wsc reset=none",)], study="ablation"),
    Claim("Reset alone gains nothing over Replay", [("wsc average=False",)], [R], accepts=NEARLY, study="ablation"),
    Claim(
        "The product of moments ranks as well as Fisher and Hessian",
        [W],
        [("wsc importance=fisher", "wsc importance=hessian")],
        THREE,
        NO_WORSE,
        study="importance",
    ),
    Claim(
        "The product ranks better than one moment",
        [W],
        [("wsc importance=first_moment", "wsc importance=second_moment")],
        THREE,
        study="importance",
    ),
    Claim("Drift ranks as well as the product", [("wsc importance=drift",)], [W], THREE, NO_WORSE, study="importance"),
    *(
        Claim(f"Blending is ahead of {rule}", [W], [(f"wsc reset={name}",)], THREE, study="reset-rule")
        for name, rule in RULES.items()
    ),
    Claim(
        "One reset does as well as one after each epoch",
        [W],
        [("wsc reset_every=epoch",)],
        THREE,
        NO_WORSE,
        study="reset-frequency",
    ),
    Claim("A reset after each iteration harms", [W], [("wsc reset_every=iteration",)], THREE, study="reset-frequency"),
    Claim(
        "With averaging, retaining 10 or 20 % does as well as all",
        [(*W, "wsc retain=0.1")],
        [("wsc retain=1",)],
        THREE,
        NO_WORSE,
    ),
    Claim("Full retraining is ahead of WSC with a large memory", [("joint",)], [W], (60, 80), study="retraining"),
    Claim("Full retraining is behind Replay with a medium memory", [R], [("joint",)], (20, 40), study="retraining"),
    Claim(
        "Full retraining costs more than Replay",
        [("joint",)],
        [],
        (60, 80),
        (1, inf),
        measure="cost",
        stated="no number",
    ),
    Claim(
        "Memory aligns the gradients of new and past data",
        [R],
        [R],
        (100,),
        against=(4,),
        measure="cosine",
        stated="no number",
    ),
    Claim(
        "Memory reduces the gradient at the start of a task",
        [R],
        [R],
        (4,),
        against=(100,),
        measure="gradient",
        stated="no number",
    ),
    Claim(
        "Memory reduces the drift of the weights over a task, of five times the steps",
        [R],
        [R],
        (4,),
        against=(100,),
        measure="drift",
        stated="no number",
    ),
    Claim("Memory lowers the accuracy on the newest task", [R], [R], (4,), against=(100,), measure="newest"),
    Claim("Memory reduces forgetting", [R], [R], (4,), against=(100,), measure="forgetting"),
    Claim(
        "At full memory, training loss stays above that of fresh weights",
        [R],
        [("joint in Replay's schedule",)],
        (100,),
        measure="loss",
    ),
    Claim("WSC is ahead of Replay without memory", [W], [R], (0,), study="zero-memory"),
    Claim(
        "Reservoir sampling does as well as the default",
        [with_(EIGHT, "exemplars=reservoir")],
        [EIGHT],
        (4, 40),
        NEARLY,
        study="reservoir",
    ),
    Claim(
        "WSC loses less than the others by twenty tasks",
        [("wsc tasks=20",), (*R, *OTHERS)],
        [W, with_((*R, *OTHERS), "tasks=20")],
        (4, 40),
        study="twenty",
    ),
)
METHODS = tuple(Claim(NAMES[row], [(row,)], [R]) for row in ("wsc", *OTHERS))
OWN_AND_EQUAL = tuple(  # each of the others in its own schedule, and at Replay's operations
    (Claim(NAMES[row], [(row,)], [R], THREE), Claim(NAMES[row], [with_((row,), "equal operations")], [R], THREE))
    for row in OTHERS
)


def retaining(share: float, average: bool) -> str:
    """The row of WSC that retains this share of the parameters."""
    retain = "" if share == 0.2 else f" retain={share:g}"
    return f"wsc{'' if average else ' average=False'}{retain}"


RETAINED = tuple(  # each share, with averaging and without it, against all
    tuple(
        Claim(f"{100 * share:g}", [(retaining(share, average),)], [(retaining(1, average),)], THREE)
        for average in (True, False)
    )
    for share in (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
)


# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# The paper's claims, one by one

This page checks the paper's claims in a protocol that is complete but small enough for a laptop:
[the night files](paper.md#a-night-on-a-laptop), with five seeds. It is not the paper's protocol: it has 50 classes with
25 images of 16 pixels each, a small network, and a fraction of the epochs. A claim that is not seen here may hold in
the paper's setting, and the other way round.

Each claim is a difference in average accuracy, in points, that should be above 0 or within the limits in brackets.
[Some are of other measures](#how-to-read-the-table). *Ours* is the mean over pairs of runs with the same seed, and the
half-width of its 95 % interval. A claim is *seen* if the interval is within the limits, *the opposite* if it is
outside, and *not seen* if it is partly within.

![Gain of each method over Replay, against the share of images in memory, here and in the paper](images/claims.svg)

Average accuracy over Replay's with the same memory, here with 95 % intervals over pairs of runs with the same seed. A
method is shown at the memory sizes at which all five seeds have run.

"""
READING = """\
## How to read the table

- *Memory*: the share of each class's images that is kept. In "4 against 100" the difference is that of the first size
  less that of the second.
- *The paper*: the paper's difference; "figure" where it has only a figure, "no number" where it has neither.
- *Ours*: intervals are Student's. With five seeds, a true difference as large as the half-width would be distinguished
  from 0 in little more than half of all repetitions, and one 1.35 times as large in four of five.
- *The best* of several methods is the one with the best mean over the seeds, at each size. It is chosen by the test
  accuracies that it is compared by, which favours it; the interval does not include this choice.
- *Other measures*: accuracy on the newest task, and forgetting, in points; the cosine between the gradients of new and
  of past data at the start of a task; the norm of the mean gradient there, which times the learning rate is the paper's
  drift; the norm of the weights' change over a task (drift), which takes five times as many steps with the full memory;
  the training loss of the last epoch, where fresh weights are trained in Replay's schedule.
- *Costs* are ratios: the floating-point operations of the training passes, divided by Replay's with the same memory.
  They follow from the schedules. WSC makes the same passes as Replay, so that its ratio is 1 by construction;
  [Speed](speed.md) and [the page on WSC](wsc.md#what-it-costs) have the measured times, with what WSC's work on the
  weights adds. The paper compares times. Those of the runs here cannot be compared, since other programs were running
  on the machines.
- *WSC* takes a plain mean of the weights every 2.9 epochs of 40, as the paper's every 5 epochs of 70. This is
  [not the default](wsc.md#where-it-departs-from-the-papers-text). Wherever weights are averaged, the learning rate
  stays at 0.1 after the warm-up; Replay and the reset alone keep the step decay. The paper does not state WSC's
  rate. With the step decay, neither of the two averages that were run in this protocol is shown to gain anything
  ([which average](wsc.md#which-average)).
- *Options that count images or steps* are scaled: BiC holds out a tenth of the exemplars (`validation`), FOSTER's class
  weights (`beta1`, `beta2`) count each image twenty times, and continual backprop has a higher rate and a lower
  maturity, as it would replace no unit with its defaults. These three were changed after their first runs on the test
  images; [with 4 % of the images](../results/night/README.md) BiC and FOSTER had been 2.9 and 6.1 points lower.
"""
CAUTION = """\
- The reset gains nothing here over averaging alone. So scores, retain rates and reset rules have little to decide, and
  the verdicts about them say little about the paper's setting. With a limit of -0.5 instead of -1, only the verdict
  about drift would change.
"""
AT_EACH_SIZE = """\
## At each memory size

The paper's difference, then ours with the half-width of its interval. Each entry is of the seeds that have run at this
size, two at least; the table above is of those that have run at all sizes of the claim. The paper's table of twenty
tasks contradicts itself at 40 %: WSC's accuracy there, 76.65, is 2.16 points above that of ten tasks, but the
difference printed beside it is 0.22. With that difference, the paper's entry there would be +2.28. Our twenty tasks
have 40 classes, the ten tasks 50, so that both numbers change at once.
"""
AGAINST_REPLAY = """\
## Each method against Replay

The difference from Replay with the same memory, in the paper and ours, as above.

WA gains nothing here. It scales the head's rows of new classes to the mean norm of the old ones, which makes up for
their being longer. After the few steps of this protocol they are not: the old rows are 1.04 times as long on average
with 4 % of the images in memory, and 1.29 times with all of them, so that the scaling favours the new classes. With all
images this explains why WA is behind: without the scaling its average accuracy is higher by 2.82 ± 0.79 points, and
0.06 ± 0.74 above Replay's. With 4 % the scaling makes no difference that five seeds show: without it, WA is higher by
0.50 ± 0.69 points, and 0.43 ± 0.74 above Replay. The sizes between were not run
([record](../results/night/wa_alignment.csv), `python docs/scripts/wa_alignment.py`).
"""
AT_REPLAYS_OPERATIONS = """\
## At Replay's operations

The difference from Replay with the same memory: in the method's own schedule, with its cost in multiples of Replay's
operations in brackets, and in a schedule so short that it costs what Replay's does
(`exps/night/equal_operations.json`). WSC costs what Replay does in its own schedule.
"""
RETAIN_RATES = """\
## Retain rates

The difference from retaining all parameters, which resets none, with the same memory. WSC retains 20 %, and averages.
"""
RANKS = """\
## Ranks of the eight methods

Kendall's tau between our order of the eight methods and the paper's (1: the same, -1: reversed), with the 95 % interval
of the bootstrap over our seeds, and the probability of a tau as far from 0 without any correlation. The interval takes
the paper's means as exact, and with so few seeds it is too narrow.
"""


def page(found: Sequence[Record]) -> str:
    """The page docs/claims.md."""
    table = table_of(found)
    findings = sorted((finding(claim, table) for claim in CLAIMS), key=lambda each: VERDICTS.index(each.verdict))
    wide = [by_share(each) for each in findings if len(each.claim.shares) > 1]
    parts = (
        markdown(("claim", "memory, %", "the paper", "ours", "verdict"), map(summary, findings)),
        READING + cautions(findings, table),
        AT_EACH_SIZE,
        markdown(("claim", *(f"{share} %" for share in SHARES)), wide),
        AGAINST_REPLAY,
        markdown(("method", *(f"{share} %" for share in SHARES)), [by_share(finding(each, table)) for each in METHODS]),
        AT_REPLAYS_OPERATIONS,
        markdown(
            ("method", *(f"{share} %, {name}" for share in THREE for name in ("own schedule", "equal operations"))),
            own_and_equal(table),
        ),
        RETAIN_RATES,
        markdown(
            ("retained, %", *(f"{share} %, {name}" for share in THREE for name in ("averaged", "not averaged"))),
            [[pair[0].text, *(at(share, each, table) for share in THREE for each in pair)] for pair in RETAINED],
        ),
        RANKS,
        markdown(("memory, %", *map(str, SHARES)), correlations(table)),
        "## Hours\n",
        hours(found) + "\n",
    )
    return INTRODUCTION + "\n".join(parts)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def summary(each: Finding) -> tuple[str, ...]:
    """The row of a claim in the first table."""
    claim, seeds = each.claim, each.seeds
    low, high = claim.accepts
    limits = "" if claim.accepts == (0, inf) else f" (above {low:g})" if high == inf else f" ({low:g} to {high:g})"
    sizes = f"{claim.shares[0]} to {claim.shares[-1]}" if len(claim.shares) > 3 else ", ".join(map(str, claim.shares))
    if claim.against:
        sizes += f" against {', '.join(map(str, claim.against))}"
    theirs = each.paper.mean(axis=1, skipna=False)
    paper = claim.stated if theirs.isna().all() else f"{theirs.iloc[0]:+.2f}"
    if each.verdict == NOT_RUN:
        return claim.text + limits, sizes, paper, "", f"not run yet ({each.runs} of {each.all_runs} runs)"
    few = f" ({len(seeds)} seeds)" if len(seeds) < SEEDS else ""
    return claim.text + limits, sizes, paper, measured(claim, seeds), each.verdict + few


def measured(claim: Claim, seeds: pd.Series) -> str:
    """The mean difference, or ratio of costs, with the half-width of its interval."""
    mean, half = interval(seeds)
    return f"{mean:{'' if claim.measure == 'cost' else '+'}.2f} ± {half:.2f}"


def by_share(each: Finding) -> tuple[str, ...]:
    """The row of a claim in the second table."""
    cells = [each.claim.text]
    for share in SHARES:
        texts = []
        if share in each.paper and each.paper[share].notna().all():
            texts.append(f"{each.paper[share].iloc[0]:+.2f}")
        if share in each.ours and each.ours[share].count() > 1:
            texts.append(measured(each.claim, each.ours[share].dropna()))
        cells.append("; ".join(texts))
    return tuple(cells)


def own_and_equal(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the table at Replay's operations."""
    rows = []
    for own, equal in OWN_AND_EQUAL:
        cost = finding(replace(own, measure="cost", minus=[]), table).ours.mean()
        cells = [(f"{at(share, own, table)} (×{cost[share]:.1f})", at(share, equal, table)) for share in THREE]
        rows.append([own.text, *(cell for pair in cells for cell in pair)])
    return rows


def at(share: int, claim: Claim, table: pd.DataFrame) -> str:
    """Our difference at one share of memory."""
    seeds = finding(claim, table).ours[share].dropna()
    return measured(claim, seeds) if len(seeds) > 1 else NOT_RUN


def cautions(findings: Sequence[Finding], table: pd.DataFrame) -> str:
    """What to keep in mind when reading the verdicts, in a list."""
    items = [CAUTION]
    if lost := by_chance([each for each in findings if each.claim.accepts == (0, inf) and not each.claim.best]):
        count, claims = lost
        items.append(
            f"- Of so many verdicts, some may be due to chance. By Holm's correction for the {count} differences from "
            f"0, the verdicts about these claims would be *not seen*: {'; '.join(claims)}."
        )
    if apart := first_tasks_apart(table):
        compared = [each for each in findings if each.claim.measure == "average" and each.verdict != NOT_RUN]
        later = [finding(replace(each.claim, measure="later"), table) for each in compared]
        changed = [
            f"{each.claim.text} ({measured(alone.claim, alone.seeds)}, {alone.verdict})"
            for each, alone in zip(compared, later)
            if each.verdict != alone.verdict
        ]
        verdicts = f"these verdicts change: {'; '.join(changed)}" if changed else "all are the same"
        items.append(
            "- The runs come from several machines and two versions of torch, which round differently, so that those "
            f"of a seed need not have the same network after the first task: its accuracy differs by up to {apart:.1f} "
            f"points. This adds noise to the differences. On average over the later tasks alone, {verdicts}."
        )
    return "\n".join(fill(item, 120, subsequent_indent="  ") for item in items) + "\n"


def correlations(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the third table."""
    wide = by_seed(table, "average")
    taus, chances, seeds = ["Kendall's tau"], ["p"], ["seeds"]
    for share in SHARES:
        found = correlation(wide, EIGHT, share)
        taus.append(f"{found.tau:+.2f} ({found.low:+.2f} to {found.high:+.2f})" if found else NOT_RUN)
        chances.append(f"{found.chance:.2f}" if found else "")
        seeds.append(str(found.seeds) if found else "")
    return [taus, chances, seeds]


def hours(found: Sequence[Record]) -> str:
    """What the runs of ``all.json`` took, and what they were estimated to take."""
    found = [record for record in found if not record.config.get("operations_like")]
    spent = sum(record.data["total_seconds"] for record in found) / 3600 / 2
    text = f"{len(found):,} runs are recorded, each on one core; together they took {spent:.1f} hours of two cores."
    text += " That is by the clock: the times at which a run had to wait for other work on its machine are included."
    runs, estimate = ESTIMATE
    return f"{text} The estimate for all {runs:,} runs is {estimate:g} hours (`--dry-run --measure`, on an AMD EPYC)."


def main() -> None:
    found = recorded(RUNS)
    PAGE.write_text(page(found), encoding="utf-8")
    draw(IMAGE, found)


if __name__ == "__main__":
    main()
