"""Write docs/claims_in_detail.md, which :mod:`claims` calls: the numbers behind the claims, at each memory size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import fill

import pandas as pd
from claim_findings import (  # beside this file, as the next one is
    EIGHT,
    NOT_RUN,
    OTHERS,
    ROOT,
    SHARES,
    THREE,
    VERDICTS,
    Claim,
    Finding,
    by_seed,
    correlation,
    finding,
    in_setting,
    interval,
    row_name,
    table_of,
)
from figure import NAMES

from pycil_wsc.results import Record

PAGE = ROOT / "docs" / "claims_in_detail.md"
ESTIMATE = 1015, 24.8  # all runs, and the hours of two cores that they take by `--dry-run --measure`, on an AMD EPYC
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


def retaining(share: float, average: bool) -> str:
    """The row of WSC that retains this fraction of the parameters."""
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
# The claims in detail

The numbers behind [The paper's claims](claims.md), from the runs of [the night files](paper.md#a-night-on-a-laptop).
± is the half-width of a 95 % interval by Student's t over runs of five seeds, paired where they are compared.

## Measures

- *Other measures* than average accuracy: accuracy on the newest task, and forgetting, in points; the cosine between the
  gradients of new and of past data at the start of a task; the norm of the mean gradient there, which times the
  learning rate is the paper's drift; the norm of the weights' change over a task (drift), which takes five times as
  many steps with the full memory; the training loss of the last epoch, where fresh weights are trained in Replay's
  schedule.
- *Costs* are ratios: the floating-point operations of the training passes, divided by Replay's with the same memory.
  They follow from the schedules. WSC makes the same passes as Replay, so that its ratio is 1 by construction;
  [Speed](speed.md) and [the page on WSC](wsc.md#what-it-costs) have the measured times, with what WSC's work on the
  weights adds. The paper compares times. Those of the runs here cannot be compared, since other programs were running
  on the machines.

## Settings

- *WSC* takes a plain mean of the weights every 2.9 epochs of 40, as the paper's every 5 epochs of 70. This is
  [not the default](wsc.md#where-it-departs-from-the-papers-text). Wherever weights are averaged, the learning rate
  stays at 0.1 after the warm-up; Replay and the reset alone keep the step decay. The paper does not state WSC's
  rate. With the step decay, neither of the two averages that were run in this protocol is shown to gain anything
  ([which average](wsc.md#which-average)).
- *Options that count images or steps* are scaled: BiC holds out a tenth of the exemplars, at least 1 of 2
  (`validation`), FOSTER's class weights (`beta1`, `beta2`) count each image twenty times, and continual backprop has a
  higher rate and a lower maturity, as it would replace no unit with its defaults. These three were changed after their
  first runs on the test images: [with 4 % of the images](../results/night/README.md) BiC and FOSTER had been 2.9 and
  6.1 points lower. With 4 %, one image per class, BiC has none to hold out, and learns no bias correction.
- *Twenty tasks* have two classes each, 40 in all, where the ten tasks have 50.
"""
AT_EACH_SIZE = """\
## At each memory size

The paper's difference, then ours with the half-width of its interval. Each entry is of the seeds that have run at this
size, two at least; the table of [the claims](claims.md) is of those that have run at all sizes of the claim. The
paper's table of twenty tasks contradicts itself at 40 %: WSC's accuracy there, 76.65, is 2.16 points above that of ten
tasks, but the difference printed beside it is 0.22. With that difference, the paper's entry there would be +2.28. Our
twenty tasks have 40 classes, the ten tasks 50, so that both numbers change at once.
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
IN_OTHER_SETTINGS = """\
## In other settings

The average accuracy, in percent, without exemplars, with exemplars chosen by reservoir sampling instead of herding
([by an earlier rule](claims.md#how-far-to-trust-it)), and in twenty tasks. Without exemplars, Finetune, which trains on
the new classes alone, is ahead of all. The paper's runs without exemplars probably [had one per class](paper.md).
"""
AT_REPLAYS_OPERATIONS = """\
## At Replay's operations

The difference from Replay with the same memory: in the method's own schedule, with its cost in multiples of Replay's
operations in brackets, and in a schedule so short that it costs what Replay's does
(`exps/night/equal_operations.json`). WSC costs what Replay does in its own schedule. So shortened, each of the six is
behind Replay with 40 and with 100 % of the images; with 4 %, FOSTER alone is ahead of it.
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


def page(found: Sequence[Record], claims: Sequence[Claim]) -> str:
    """The page docs/claims_in_detail.md."""
    table = table_of(found)
    findings = sorted((finding(claim, table) for claim in claims), key=lambda each: VERDICTS.index(each.verdict))
    wide = [by_share(each) for each in findings if len(each.claim.shares) > 1]
    sizes = [f"{share} %" for share in SHARES]
    parts = (
        INTRODUCTION,
        AT_EACH_SIZE,
        markdown(("claim", *sizes), wide),
        AGAINST_REPLAY + of_bic(found),
        markdown(("method", *sizes), [by_share(finding(each, table)) for each in (REPLAY, *METHODS)]),
        IN_OTHER_SETTINGS,
        markdown(("method", *(name for name, _, _ in OTHER_SETTINGS)), in_other_settings(table)),
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


def of_bic(found: Sequence[Record]) -> str:
    """What BiC's bias correction does to the newest classes, where it has images."""
    corrected = [record for record in found if row_name(record) == "bic" and record.memory > 1]
    newest = [row[-1] for record in corrected for row in record.data["matrix"][1:]]
    if not newest:
        return ""
    lost = 100 * sum(accuracy == 0 for accuracy in newest) / len(newest)
    text = (
        "BiC's bias correction does harm here. It is learned from one or two held-out images of each class; in "
        f"{lost:.0f} % of the tasks after the first, in the runs with 8 % of the images or more, no test image of the "
        "newest classes is recognised after it. With 8, 16 and 20 % BiC is 2.0, 2.7 and 2.7 points better "
        "[without it](../results/night/README.md). With 4 % there is no correction."
    )
    return f"\n{fill(text, 120)}\n"


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


def correlations(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the table of ranks."""
    wide = by_seed(table, "average")
    taus, chances, seeds = ["Kendall's tau"], ["p"], ["seeds"]
    for share in SHARES:
        found = correlation(wide, EIGHT, share)
        taus.append(f"{found.tau:+.2f} ({found.low:+.2f} to {found.high:+.2f})" if found else NOT_RUN)
        chances.append(f"{found.chance:.2f}" if found else "")
        seeds.append(str(found.seeds) if found else "")
    return [taus, chances, seeds]


def seconds_of(record: Record) -> float:
    """What the run took, without the training of a first task that it took from another one."""
    run = record.data
    return run["total_seconds"] - run["train_seconds"] + run.get("train_seconds_spent", run["train_seconds"])


def hours(found: Sequence[Record]) -> str:
    """What the runs of ``all.json`` took, and what they were estimated to take."""
    found = [record for record in found if not record.config.get("operations_like")]
    spent = sum(map(seconds_of, found)) / 3600 / 2
    text = f"{len(found):,} runs are recorded, each on one core; together they took {spent:.1f} hours of two cores,"
    text += " where at most ten were aimed at. That is by the clock: the times at which a run had to wait for other"
    text += " work on its machine are included."
    runs, estimate = ESTIMATE
    return f"{text} The estimate for all {runs:,} runs is {estimate:g} hours (`--dry-run --measure`, on an AMD EPYC)."
