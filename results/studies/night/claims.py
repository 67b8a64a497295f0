"""Write docs/claims.md, its figure, docs/claims_in_detail.md and results/studies/night/claims.md: the paper's claims
beside the runs of exps/studies/night.

python results/studies/night/claims.py
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from textwrap import fill

import claims_by_memory  # beside this file, as the next ones are
import claims_in_detail
import pandas as pd
from claim_findings import (
    CONVERGED,
    DISTILLING,
    EIGHT,
    EXPANDING,
    NOT_RUN,
    NOT_TESTED,
    OTHERS,
    RESET_GAIN,
    ROOT,
    RUNS,
    SEEDS,
    SHARES,
    THREE,
    VERDICTS,
    Claim,
    Finding,
    by_chance,
    detectable,
    finding,
    first_tasks_apart,
    in_setting,
    interval,
    recorded,
    table_of,
)
from claims_figure import IMAGE, draw
from claims_in_detail import markdown, measured

from pycil_wsc.results.run_table import Row

PAGE = ROOT / "docs" / "claims.md"
MARGIN = 1.0  # points of accuracy that count as no difference
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
    Claim("Replay is behind distillation with a small memory", [DISTILLING], [R], (4,), added=True),
    Claim("Replay is ahead of distillation with a large memory", [R], [DISTILLING], (80, 100)),
    Claim(
        "Replay is ahead of the best method that distils, with a large memory",
        [R],
        [DISTILLING],
        (80, 100),
        best=True,
        added=True,
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
    Claim("Averaging alone is ahead of Replay", [("wsc reset=none",)], [R], study="ablation", added=True),
    RESET_GAIN,
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
        "The product of moments ranks better than one moment",
        [W],
        [("wsc importance=first_moment", "wsc importance=second_moment")],
        THREE,
        study="importance",
    ),
    Claim(
        "Drift ranks as well as the product of moments",
        [("wsc importance=drift",)],
        [W],
        THREE,
        NO_WORSE,
        study="importance",
        added=True,
    ),
    Claim(
        "Blending is ahead of the best other rule",
        [W],
        [[f"wsc reset={name}" for name in RULES]],
        THREE,
        best=True,
        study="reset-rule",
    ),
    *(
        Claim(f"Blending is ahead of {rule}", [W], [(f"wsc reset={name}",)], THREE, study="reset-rule", added=True)
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
        added=True,
    ),
    Claim(
        "With full memory the weights drift less over a task, though it has five times as many steps",
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
        "With full memory, Replay ends a task with a higher training loss than fresh weights",
        [R],
        [("joint in Replay's schedule",)],
        (100,),
        measure="loss",
    ),
    Claim("WSC is ahead of Replay without memory", [W], [R], (0,), study="zero-memory"),
    Claim(
        "Reservoir sampling does as well as the default",
        [in_setting(EIGHT, "exemplars=reservoir")],
        [EIGHT],
        (4, 40),
        NEARLY,
        study="reservoir",
    ),
    Claim(
        "WSC loses less than the others by twenty tasks",
        [("wsc tasks=20",), (*R, *OTHERS)],
        [W, in_setting((*R, *OTHERS), "tasks=20")],
        (4, 40),
        study="twenty",
    ),
)
# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# The paper's claims, one by one

This page shows which of the paper's claims hold in a protocol that is small enough for a laptop. Check one of them in a
few minutes:

```bash
python main.py --config exps/studies/night/ablation.json --set memory_per_class=1 --workers 2
```

Replay, WSC, averaging alone and the reset alone train with one exemplar per class. This takes about five minutes of two
idle cores. [CIFAR-100](getting_started.md#your-own-data) is downloaded first.

"""
CHECKED = """\
In `runs/night/report/index.html`, the table *Difference from Replay* then has WSC's gain and its standard error: here,
{gain} ± {error} points. The 95 % interval is ± {half}. Another machine rounds differently, so expect a similar number,
not this one.

"""
PROTOCOL = """\
## The verdicts

{counts}

The runs have [a small protocol](paper.md#a-small-protocol): small images of half of CIFAR-100's classes, a small
ResNet, and a fraction of the epochs. WSC takes [a plain mean](wsc.md#which-average) of the weights.

![Gain of each method over Replay, against the fraction of images in memory, here and in the paper](images/claims.svg)

Each claim is a difference in average accuracy, the mean of the accuracies after each task, in points. It should be
above 0, or within the limits in brackets. Some claims are about [other measures](claims_in_detail.md#measures).

"""
READING = """\
- *Memory*: the fraction of each class's images kept. "4 against 100" is the difference of these two sizes.
- *The paper*: the paper's difference. "Figure": the paper has a figure but no number. "No number": it has neither.
- *Ours*: the mean over pairs of runs with the same seed, and the half-width of its 95 % interval (Student's t).
- *Detectable*: the true difference that five seeds would show in four of five repetitions.
- *Verdict*: *seen* if the interval is within the limits, *the opposite* if it is outside, *not seen* if it is partly
  within. *Not by Holm*: the difference is no longer significant after Holm's correction for {count} tests.
- *(added)*: the claim was added after some of its results were known.

"""
UNTESTED = """\
## Not tested here

These runs cannot decide the following claims, whatever the difference. A script applies the same four rules to all:

- *training*: the claim is about plasticity or full retraining, but the networks are not fully trained: their training
  accuracy is below {converged:.0f} %.
- *schedule*: the better method trains longer and the other is undertrained, so the schedule alone may explain the
  difference.
- *reset*: the claim compares ways to reset. Here the reset itself gains nothing, and no difference from 0 is visible.
- *classes*: the runs learn different numbers of classes.

"""
CAUTIONS = """\
## How far to trust it

- A claim confirmed here may fail in the paper's setting, and vice versa.
- *The best* of several methods is chosen by the same test accuracies that the claim compares. This favours it.
- "Reservoir sampling" drew a task's exemplars from all of its images and never replaced them. This is not
  [reservoir sampling](methods.md#reservoirs) in the strict sense. With one exemplar per class, about a third of the
  classes had none.
"""
LINK = "[The claims in detail](claims_in_detail.md): measures, costs and every method.\n"


def page(found: Sequence[Row]) -> str:
    """The page docs/claims.md."""
    table = table_of(found)
    findings = sorted((finding(claim, table) for claim in CLAIMS), key=lambda each: VERDICTS.index(each.verdict))
    decided = [each for each in findings if each.verdict != NOT_TESTED]
    count, lost = by_chance([each for each in decided if each.claim.accepts == (0, inf)])
    header = ("claim", "memory, %", "the paper", "ours", "detectable", "verdict")
    parts = [
        INTRODUCTION,
        checked(table),
        PROTOCOL.format(counts=counts(findings)),
        markdown(header, [summary(each, each.claim.text in lost) for each in decided]),
        "\n",
        READING.format(count=count),
    ]
    untested = [(*summary(each)[:4], each.untested) for each in findings if each.verdict == NOT_TESTED]
    if untested:
        parts += [UNTESTED.format(converged=CONVERGED), markdown((*header[:4], "why"), untested), "\n"]
    return "".join([*parts, CAUTIONS, cautions(findings, table), "\n", LINK])


def counts(findings: Sequence[Finding]) -> str:
    """How many claims have each verdict, as a list."""
    number = Counter(each.verdict for each in findings)
    verdicts = ("seen", "not seen", "the opposite", NOT_TESTED, NOT_RUN)
    return "Claims by verdict:\n\n" + "\n".join(f"- *{name}*: {number[name]}" for name in verdicts if number[name])


def checked(table: pd.DataFrame) -> str:
    """What the runs of the command on top of the page show."""
    seeds = finding(replace(RESET_GAIN, minus=[R], shares=(4,)), table).seeds
    if len(seeds) < SEEDS:
        return ""
    mean, half = interval(seeds)
    return CHECKED.format(gain=f"{mean:+.2f}", error=f"{seeds.sem():.2f}", half=f"{half:.2f}")


def summary(each: Finding, by_chance: bool = False) -> tuple[str, ...]:
    """The row of a claim; ``by_chance``: whether its verdict falls by Holm's correction."""
    claim, seeds = each.claim, each.seeds
    low, high = claim.accepts
    text = claim.text
    if claim.accepts != (0, inf):
        text += f" (above {low:g})" if high == inf else f" ({low:g} to {high:g})"
    if claim.added:
        text += " (added)"
    sizes = f"{claim.shares[0]} to {claim.shares[-1]}" if len(claim.shares) > 3 else ", ".join(map(str, claim.shares))
    if claim.against:
        sizes += f" against {', '.join(map(str, claim.against))}"
    theirs = each.paper.mean(axis=1, skipna=False)
    paper = claim.stated if theirs.isna().all() else f"{theirs.iloc[0]:+.2f}"
    if each.verdict == NOT_RUN:
        return text, sizes, paper, "", "", f"not run yet ({each.runs} of {each.all_runs} runs)"
    few = f" ({len(seeds)} seeds)" if len(seeds) < SEEDS else ""
    chance = ", not by Holm" if by_chance else ""
    least = "" if claim.measure == "cost" else f"{detectable(len(seeds)) * interval(seeds)[1]:.2f}"
    return text, sizes, paper, measured(claim, seeds), least, each.verdict + chance + few


def cautions(findings: Sequence[Finding], table: pd.DataFrame) -> str:
    """What the runs themselves say about how far to trust the verdicts, in a list."""
    apart = first_tasks_apart(table)
    if not apart:
        return ""
    compared = [each for each in findings if each.claim.measure == "average" and each.verdict in VERDICTS[:3]]
    changed = []
    for each in compared:
        alone = finding(replace(each.claim, measure="later"), table)
        if alone.outcome != each.verdict:
            changed.append(f"{each.claim.text} ({measured(alone.claim, alone.seeds)}, {alone.outcome})")
    items = [
        "- The runs come from several machines and two versions of torch, which round differently. So the accuracy "
        f"after the first task differs by up to {apart:.1f} points between runs of one seed.",
        "- Over the later tasks alone, "
        + (f"these verdicts change: {'; '.join(changed)}." if changed else "all verdicts are the same."),
    ]
    return "".join(fill(item, 120, subsequent_indent="  ") + "\n" for item in items)


def main() -> None:
    found = recorded(RUNS)
    PAGE.write_text(page(found), encoding="utf-8")
    claims_in_detail.PAGE.write_text(claims_in_detail.page(found), encoding="utf-8")
    claims_by_memory.PAGE.write_text(claims_by_memory.page(found, CLAIMS), encoding="utf-8")
    draw(IMAGE, found)


if __name__ == "__main__":
    main()
