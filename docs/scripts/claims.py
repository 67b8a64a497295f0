"""Write docs/claims.md, its figure and docs/claims_in_detail.md: the paper's claims beside the runs of exps/night.

python docs/scripts/claims.py
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from textwrap import fill

import claims_in_detail  # beside this file, as the next ones are
import pandas as pd
from claim_findings import (
    DISTILLING,
    EIGHT,
    EXPANDING,
    NOT_RUN,
    OTHERS,
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

from pycil_wsc.results import Record

PAGE = ROOT / "docs" / "claims.md"
MARGIN = 1.0  # points of accuracy that count as no difference
TRAINED = ["replay", "joint", "joint in Replay's schedule"]
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

This page checks the paper's claims in a protocol that is complete but small enough for a laptop:
[the night files](paper.md#a-night-on-a-laptop), with five seeds. It is not the paper's protocol: it has 50 classes with
25 images of 16 pixels each, a small network, and a fraction of the epochs. A claim that is not seen here may hold in
the paper's setting, and the other way round. The methods and the options of WSC are explained in
[Methods](methods.md) and [Weight Space Consolidation](wsc.md#importance-reset-rule-frequency-and-trigger).

![Gain of each method over Replay, against the fraction of images in memory, here and in the paper](images/claims.svg)

Average accuracy over Replay's with the same memory, here with 95 % intervals over pairs of runs with the same seed.
*Average accuracy* is the mean of the accuracies after each task. A method is shown at the memory sizes at which all
five seeds have run.

Each claim is a difference in average accuracy, in points, that should be above 0 or within the limits in brackets;
some are of [other measures](claims_in_detail.md#measures).

"""
READING = """\
- *Memory*: the fraction of each class's images kept. In "4 against 100" the difference is that of the first size
  less that of the second.
- *The paper*: the paper's difference; "figure" where it has only a figure, "no number" where it has neither.
- *Ours*: the mean over pairs of runs with the same seed, and the half-width of its 95 % interval by Student's t.
- *Detectable*: how far from 0, or from the limit, the true difference would have to be for five seeds to show it in
  four of five repetitions of these runs.
- *Verdict*: *seen* if the interval is within the limits, *the opposite* if it is outside, and *not seen* if it is
  partly within.
- *(added)*: the claim is not in the list that was written before the first run. It was added when some of its runs had
  been seen.

## How far to trust it

"""
CAUTIONS = """\
- *The best* of several methods is the one with the best mean over the seeds, at each size. It is chosen by the test
  accuracies that it is compared by, which favours it; the interval does not include this choice.
- The reset gains nothing here over averaging alone. So scores, retain rates and reset rules have little to decide, and
  the verdicts about them say little about the paper's setting. With a limit of -0.5 instead of -1, only the verdict
  about drift would change.
- Reservoir sampling is compared with herding, the default here and in PyCIL. The paper calls its own default random
  sampling. The runs drew the exemplars of a task from its images whatever their class, as many as there are for its new
  classes, and replaced none later: [not a reservoir](methods.md#reservoirs) in the strict sense. With one exemplar per
  class, about a third of the classes thus had none, which explains a part of the difference.
- The language models of the paper's second half are not checked here.
"""
LINK = "[The claims in detail](claims_in_detail.md): measures, costs, every memory size, every method, and the hours.\n"


def page(found: Sequence[Record]) -> str:
    """The page docs/claims.md."""
    table = table_of(found)
    findings = sorted((finding(claim, table) for claim in CLAIMS), key=lambda each: VERDICTS.index(each.verdict))
    parts = (
        markdown(("claim", "memory, %", "the paper", "ours", "detectable", "verdict"), map(summary, findings)),
        READING + CAUTIONS + cautions(findings, table),
        LINK,
    )
    return INTRODUCTION + "\n".join(parts)


def summary(each: Finding) -> tuple[str, ...]:
    """The row of a claim."""
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
    least = "" if claim.measure == "cost" else f"{detectable(len(seeds)) * interval(seeds)[1]:.2f}"
    return text, sizes, paper, measured(claim, seeds), least, each.verdict + few


def cautions(findings: Sequence[Finding], table: pd.DataFrame) -> str:
    """What the runs themselves say about how far to trust the verdicts, in a list."""
    items = []
    if lost := by_chance([each for each in findings if each.claim.accepts == (0, inf)]):
        count, claims = lost
        items.append(
            f"- Of so many verdicts, some may be due to chance. By Holm's correction for the {count} differences from "
            f"0, the verdicts about these claims would be *not seen*: {'; '.join(claims)}."
        )
    trained = table.loc[table["share"].eq(100)].groupby("row")["trained"].mean()
    if trained.reindex(TRAINED).notna().all():
        replay, joint, fresh = trained[TRAINED]
        items.append(
            "- Training is short. With the full memory, the training accuracy at the end of a task is "
            f"{replay:.0f} % for Replay, {joint:.0f} % for full retraining, which has 114 epochs instead of 40, and "
            f"{fresh:.0f} % for fresh weights in Replay's schedule. Fresh weights have not finished learning when "
            "training stops, so the verdicts about full retraining and the training loss do not test what the paper "
            "says of networks that are trained to the end."
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
    return "".join(fill(item, 120, subsequent_indent="  ") + "\n" for item in items)


def main() -> None:
    found = recorded(RUNS)
    PAGE.write_text(page(found), encoding="utf-8")
    claims_in_detail.PAGE.write_text(claims_in_detail.page(found, CLAIMS), encoding="utf-8")
    draw(IMAGE, found)


if __name__ == "__main__":
    main()
