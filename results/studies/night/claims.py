"""The paper's claims beside the runs of exps/studies/night: docs/claims_in_detail.md, its figure, and
results/studies/night/claims.md, which this script writes; and a table of docs/claims.md.

python results/studies/night/claims.py
"""

import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "scripts"))

import claims_by_memory  # beside this file, as are the next two and night_runs
import claims_figure
import claims_in_detail
from findings import RESET_GAIN, SHARES, VERDICTS, Claim, Finding, finding, summaries
from night_runs import DISTILLING, EIGHT, EXPANDING, OTHERS, SEEDS, THREE, in_setting, table_of
from over_seeds import ROOT, Row, recorded

IMAGE = ROOT / "docs" / "images" / "claims.svg"
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
STANDING = (  # claims that these runs decide and those of results/studies/well_trained do not, on docs/claims.md
    "Replay is ahead of distillation with a large memory",
    "Expansion costs three times what Replay does, or more",
    "Blending is ahead of random values",
    "A reset after each iteration harms",
    "WSC is ahead of Replay without memory",
    "Reservoir sampling does as well as the default",
)


def all_findings(runs: Sequence[Row]) -> list[Finding]:
    """What the runs say of all claims, unflattering verdicts first."""
    table = table_of(runs)
    found = [finding(claim, table) for claim in CLAIMS]
    return sorted(found, key=lambda each: VERDICTS.index(each.verdict))


def rows() -> list[tuple[str, ...]]:
    """The header and the rows of the second table of docs/claims.md, as they are in the table of all claims."""
    found = all_findings(recorded("night"))
    header, *of_claims = summaries(found, SEEDS)
    return [header, *(row for each, row in zip(found, of_claims, strict=True) if each.claim.text in STANDING)]


def main() -> None:
    runs = recorded("night")
    found = all_findings(runs)
    claims_in_detail.PAGE.write_text(claims_in_detail.page(runs, found), encoding="utf-8")
    claims_by_memory.PAGE.write_text(claims_by_memory.page(runs, found), encoding="utf-8")
    claims_figure.draw(IMAGE, runs)


if __name__ == "__main__":
    main()
