"""Claims of the paper: verdicts on made-up runs of which the truth is known, and the pages of the small protocol."""

import functools
import importlib
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from math import factorial, inf
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import kendalltau, ttest_1samp
from support import synthetic
from support.pages import numbers_beside, rows_after, shown_in

from pycil_wsc.config.loading import load
from pycil_wsc.results import Record
from pycil_wsc.results.run_table import add, read, rows_of

ROOT = Path(__file__).parents[2]
NIGHT, PAPER_PAGE = ROOT / "exps" / "studies" / "night", ROOT / "docs" / "paper.md"
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "results" / "studies" / "night"), *sys.path])
    claims = importlib.import_module("claims")
    details = importlib.import_module("claims_in_detail")
    findings = importlib.import_module("findings")
    night_runs = importlib.import_module("night_runs")
    over_seeds = importlib.import_module("over_seeds")
    claims_by_memory = importlib.import_module("claims_by_memory")
    claims_figure = importlib.import_module("claims_figure")
    imagenet100 = importlib.import_module("imagenet100")
recorded = functools.partial(over_seeds.recorded, "night")  # the committed runs
A_OVER_B = findings.Claim("A is ahead of B", [("a",)], [("b",)], (4, 40))


def table(values, **columns):
    """A table of runs from {row: {share: the average of each seed}}; None is a missing run."""
    lines = []
    for row, by_share in values.items():
        for share, seeds in by_share.items():
            for seed, value in enumerate(seeds):
                if value is not None:
                    lines.append({"row": row, "share": share, "seed": seed, "average": float(value)} | columns)
    return pd.DataFrame(lines)


def shifted(differences, share_40=0.0):
    """Runs of A and B whose seeds differ by tens of points, and A from B by ``differences`` at each share."""
    b = [10.0 * seed for seed in range(len(differences))]
    a = [value + difference for value, difference in zip(b, differences)]
    return {"a": {4: a, 40: [value + share_40 for value in a]}, "b": {4: b, 40: b}}


@pytest.mark.parametrize(
    "differences, accepts, verdict",
    [
        ([1, 2, 3, 2, 2], (0, inf), "seen"),
        ([-1, -2, -3, -2, -2], (0, inf), "the opposite"),
        ([1, -2, 3, -2, 1], (0, inf), "not seen"),
        ([0.1, -0.2, 0.1, 0, 0.2], (-1, 1), "seen"),
        ([2, -3, 2, 0.5, -1], (-1, 1), "not seen"),
        ([5, 6, 5, 6, 5], (-1, 1), "the opposite"),
        ([5, 6, 5, 6, 5], (-1, inf), "seen"),
        ([-5, -6, -5, -6, -5], (-1, inf), "the opposite"),
        ([3], (0, inf), "not run yet"),
    ],
)
def test_the_verdict_is_that_of_the_interval_of_paired_differences(differences, accepts, verdict):
    finding = findings.finding(replace(A_OVER_B, accepts=accepts), table(shifted(differences)))
    assert finding.verdict == verdict
    if len(differences) > 1:
        mean, half = findings.interval(finding.seeds)
        expected = ttest_1samp(differences, 0).confidence_interval(0.95)
        assert (mean - half, mean + half) == pytest.approx((expected.low, expected.high))


def test_the_difference_is_the_mean_over_the_sizes_of_the_memory():
    finding = findings.finding(A_OVER_B, table(shifted([1, 2, 3], share_40=10)))
    assert finding.seeds.tolist() == [6, 7, 8]
    assert finding.ours.to_numpy().tolist() == [[1, 11], [2, 12], [3, 13]]


def test_a_seed_counts_once_all_its_runs_are_there():
    values = shifted([4, 5, 6, 4, 5])
    values["a"][40][3:] = [None, None]
    finding = findings.finding(A_OVER_B, table(values))
    assert finding.seeds.index.tolist() == [0, 1, 2]
    assert findings.summary(finding, 5)[2] == "seen (3 seeds)" and findings.summary(finding, 3)[2] == "seen"
    assert finding.ours[4].count() == 5, "the table of sizes uses all"
    values["a"][40][1:] = [None] * 4
    finding = findings.finding(A_OVER_B, table(values))
    assert findings.summary(finding, 5)[2:] == ("one seed", f"{finding.seeds.iloc[0]:+.2f}", "figure", "")
    values["a"][40] = [None] * 5
    finding = findings.finding(A_OVER_B, table(values))
    assert findings.summary(finding, 5)[2:] == ("not run yet", "", "figure", "")


def test_groups_stand_for_their_mean_or_for_their_best_at_each_size():
    values = {"a": {4: [5, 5], 40: [5, 5]}, "b": {4: [1, 3], 40: [4, 4]}, "c": {4: [3, 2], 40: [2, 0]}}
    both = replace(A_OVER_B, minus=[("b", "c")])
    assert findings.finding(both, table(values)).ours.to_numpy().tolist() == [[3, 2], [2.5, 3]]
    best = replace(both, best=True)  # c at 4, whose mean is 2.5, and b at 40
    assert findings.finding(best, table(values)).ours.to_numpy().tolist() == [[2, 1], [3, 1]]
    values["b"][4][1] = None  # it is not known which would be best in this seed
    assert findings.finding(best, table(values)).ours[4].isna().tolist() == [False, True]


def test_a_claim_may_compare_memory_sizes_and_sums_of_groups():
    trend = replace(A_OVER_B, plus=[("a",)], minus=[("a",)], shares=(40,), against=(4,))
    assert findings.finding(trend, table({"a": {4: [1, 2], 40: [5, 8]}})).seeds.tolist() == [4, 6]
    twice = replace(A_OVER_B, plus=[("a",), ("d",)], minus=[("b",), ("c",)], shares=(4,))
    values = {"a": {4: [8, 9]}, "b": {4: [1, 1]}, "c": {4: [2, 2]}, "d": {4: [4, 5]}}
    assert findings.finding(twice, table(values)).seeds.tolist() == [9, 11]


def test_cost_is_in_multiples_of_replays_of_the_same_seed_and_memory():
    runs = table({"replay": {4: [0, 0], 40: [0, 0]}, "wsc": {4: [0, 0], 40: [0, None]}})
    runs["flops"] = [10.0, 20.0, 100.0, 200.0, 15.0, 22.0, 300.0]
    wide = findings.by_seed(runs, "cost")
    assert wide["wsc@4"].tolist() == [1.5, 1.1] and wide["wsc@40"].iloc[0] == 3 and wide["wsc@40"].isna().iloc[1]
    assert (wide[["replay@4", "replay@40"]] == 1).all(axis=None)


@pytest.mark.parametrize(
    "text, differences",  # by hand, from the tables of the paper
    [
        ("Replay is behind the other", {4: (66.22 + 63.95 + 61.99 + 49.95 + 53.65 + 61.32) / 6 - 48.63}),
        ("WSC is ahead of the best", {20: 67.25 - 66.90, 40: 74.49 - 72.69, 80: 77.71 - 75.71, 100: 78.16 - 77.02}),
        ("WSC is ahead of averaging", {4: 52.00 - 50.23, 100: 78.25 - 77.92}),
        ("Reset alone", {4: 48.73 - 48.92}),
        ("Averaging alone", {4: 50.23 - 48.92}),
        ("The product of moments ranks as well", {40: 73.57 - (73.49 + 73.63) / 2}),
        ("The product of moments ranks better", {4: 52.00 - (50.10 + 47.29) / 2}),
        ("Drift", {4: 51.93 - 52.00, 100: 77.90 - 78.25}),
        ("Blending is ahead of the best", {4: 52.00 - 50.93, 40: 73.57 - 71.85, 100: 78.25 - 76.52}),
        ("Blending is ahead of reverting", {4: 52.00 - 50.93}),
        ("Blending is ahead of continual backprop", {100: 78.25 - 76.52}),
        ("One reset", {4: 52.00 - 53.36}),
        ("Full retraining is ahead", {80: 78.94 - 77.71}),
        ("WSC is ahead of Replay without", {0: 29.83 - 26.07}),
        ("Reservoir", {40: (0.19 + 0.18 - 0.31 + 0.06 + 0.20 + 0.12 + 0.23 + 0.14) / 8}),
        ("WSC loses less", {4: -2.39 + (8.53 + 10.28 + 7.38 + 3.90 + 4.67 + 8.50 + 8.96) / 7}),
    ],
)
def test_the_papers_differences_are_those_of_its_tables(text, differences):
    (claim,) = [claim for claim in claims.CLAIMS if claim.text.startswith(text)]
    paper = findings.finding(claim, pd.DataFrame(columns=["row", "share", "seed", "average"])).paper.iloc[0]
    assert {share: paper[share] for share in differences} == pytest.approx(differences, abs=0.011)


def runs_in_the_papers_order(seeds, sign=1):
    paper = findings.papers_table("accuracy")
    return table(
        {name: {4: [sign * paper[f"{name}@4"].iloc[0] + seed for seed in range(seeds)]} for name in night_runs.EIGHT}
    )


def test_the_correlation_of_ranks_is_kendalls_with_all_resamples_of_seeds():
    for sign in (1, -1):
        wide = findings.by_seed(runs_in_the_papers_order(3, sign), "average")
        assert night_runs.correlation(wide, night_runs.EIGHT, 4) == pytest.approx(
            (sign, sign, sign, 2 / factorial(8), 3)
        )
    assert night_runs.correlation(wide.iloc[:1], night_runs.EIGHT, 4) is None, "one seed has no interval"
    wide = wide + np.random.default_rng(0).normal(0, 10, wide.shape)
    tau, low, high, chance, _ = night_runs.correlation(wide, night_runs.EIGHT, 4)
    columns = [f"{name}@4" for name in night_runs.EIGHT]
    paper = findings.papers_table("accuracy")[columns].iloc[0]
    resamples = [wide.iloc[list(chosen)][columns].mean() for chosen in itertools.product(range(3), repeat=3)]
    taus = [kendalltau(ours, paper)[0] for ours in resamples]
    assert (tau, chance) == pytest.approx(tuple(kendalltau(wide[columns].mean(), paper)))
    assert (low, high) == pytest.approx(tuple(np.quantile(taus, [0.025, 0.975]))) and low < high


def test_holms_correction_takes_the_smallest_probabilities_first():
    """Of p = .0005, .014, .03 and .04, the first two are below .05 / 4 and .05 / 3, and the third is not below .05 / 2;
    the fourth, below .05, falls with it. One of .5 was not told from 0 before either.
    """
    all_findings = []
    for chance in (0.03, 0.0005, 0.5, 0.014, 0.04):
        seeds = np.array([-1.0, -0.5, 0, 0.5, 1])
        seeds += stats.t.isf(chance / 2, 4) * seeds.std(ddof=1) / 5**0.5
        claim = replace(A_OVER_B, text=f"p = {chance:g}", shares=(4,))
        all_findings.append(findings.finding(claim, table({"a": {4: seeds}, "b": {4: [0] * 5}})))
    four = [finding for finding in all_findings if finding.claim.text != "p = 0.5"]
    assert lost_by_holm(four) == (4, ["p = 0.03", "p = 0.04"])
    assert lost_by_holm(all_findings) == (5, ["p = 0.03", "p = 0.014", "p = 0.04"])
    assert lost_by_holm(all_findings[1:2]) == (1, [])
    within_limits = replace(four[0], claim=replace(four[0].claim, accepts=(-1, 1)))
    assert lost_by_holm([*four[1:], within_limits]) == (3, []), "a claim with limits is not tested against 0"
    verdicts = [row[2] for row in findings.summaries(four, 5)[1:]]
    assert [verdict.endswith(", not by Holm") for verdict in verdicts] == [True, False, False, True]


def lost_by_holm(all_findings):
    count, lost = findings.by_chance(all_findings)
    return count, [all_findings[place].claim.text for place in sorted(lost)]


def test_first_tasks_are_compared_within_a_seed_between_runs_that_train_them_alike():
    runs = table(
        {"replay": {4: [0, 0], 40: [0, 0]}, "wsc": {4: [0, 0]}, "joint": {4: [0, 0]}, "wsc tasks=20": {4: [0]}}
    )
    runs["first"] = [50.0, 70.0, 50.0, 71.5, 50.5, 70.0, 10.0, 10.0, 90.0]
    assert night_runs.first_tasks_apart(runs) == 1.5


def record(method="wsc", memory=5, analyses=(), **keys):
    keys = {"dataset": "cifar100_16", "images_per_class": 25, "classes": 50, "increment": 5} | keys
    return replace(Record.of(synthetic.result(method, memory, **keys)), analyses=list(analyses))


OTHERS = [  # beside which the keys of one run vary
    record(),
    record("joint", init_epoch=114, epochs=40, operations_like=None, init_cls=5),
    record("der", operations_like="replay", exemplars="reservoir", increment=2, init_cls=2),
    record(wsc__retain=0.5, wsc__average=False, wsc__importance="drift"),
]


def rows(*records):
    """The rows of a table that has these runs and others."""
    runs = [(f"run {number}", one) for number, one in enumerate((*records, *OTHERS))]
    return rows_of(runs)[: len(records)]


@pytest.mark.parametrize(
    "keys, name",
    [
        ({}, "wsc"),
        ({"method": "replay", "exemplars": "reservoir"}, "replay exemplars=reservoir"),
        ({"wsc__retain": 1.0, "wsc__average": False}, "wsc average=False retain=1"),
        ({"wsc__importance": "fisher"}, "wsc importance=fisher"),
        ({"increment": 2, "classes": 40}, "wsc tasks=20"),
        ({"method": "der", "operations_like": "replay"}, "der equal operations"),
        ({"method": "joint", "init_epoch": 114, "epochs": 114}, "joint"),
        ({"method": "joint", "init_epoch": 114, "epochs": 40}, "joint in Replay's schedule"),
    ],
)
def test_a_run_is_named_by_what_differs_from_the_main_table(keys, name):
    line = night_runs.table_of(rows(record(**keys))).iloc[0]
    assert (line["row"], line["share"]) == (name, 20)


def test_the_measures_of_a_run_are_means_over_the_later_tasks():
    norms = [None, *range(1, 10)]
    analyses = [
        {
            "task": task,
            "share_new": 0.5,
            "gradients": {"cosine": None if task == 0 else 0.1 * task, "norm": float(2 * task), "norm_new": 1.0},
            "drift": {"between": None if task == 0 else {"norm": norms[task]}},
        }
        for task in range(10)
    ]
    run = record(analyses=analyses)
    run.data["train_accuracy"] = [[10.0, 20.0 + task] for task in range(10)]
    run.data["train_flops"] = 3e9
    line = night_runs.table_of(rows(run)).iloc[0]
    assert (line["cosine"], line["gradient"], line["drift"]) == pytest.approx((0.5, 10, 5))
    for measure, curves in (("loss", "train_loss"), ("trained", "train_accuracy")):
        assert line[measure] == pytest.approx(np.mean([values[-1] for values in run.data[curves][1:]]))
    assert (line["first"], line["later"]) == pytest.approx((run.curve[0], np.mean(run.curve[1:])))
    assert [line[name] for name in ("average", "newest", "forgetting", "flops")] == [
        run.data[name] for name in ("avg_acc", "new_acc", "forgetting", "train_flops")
    ]
    assert night_runs.table_of(rows(record()))[["cosine", "gradient", "drift"]].isna().all(axis=None), (
        "a run without analyses has none"
    )


@pytest.mark.slow
def test_the_table_puts_unflattering_verdicts_first_and_missing_ones_last():
    levels = {"replay": 50, "icarl": 40, "bic": 40, "wa": 40, "der": 60, "foster": 60, "memo": 60}
    runs = []
    for method, memory, seed in itertools.product(levels, (1, 20, 25), range(5)):
        average = levels[method] + (seed / 10 if method == "wa" else 0)
        runs.append(Record.of(record(method, memory, seed=seed).data | {"avg_acc": float(average)}))
    of_claims = findings.summaries(claims.all_findings(rows(*runs)), 5)[1:]
    kinds = [re.split(r" \(|,", row[2])[0] for row in of_claims]
    assert kinds == sorted(kinds, key=findings.VERDICTS.index) and len(kinds) == len(claims.CLAIMS)
    expanding = ("Replay is ahead of expansion with a large memory", "80, 100", "the opposite")
    distilling = ("Replay is ahead of distillation with a large memory", "80, 100", "seen")
    assert (*expanding, "-10.00 ± 0.00", "-0.02", "0.00") in of_claims
    assert (*distilling, "+9.93 ± 0.07", "+2.21", "0.09") in of_claims
    assert kinds[-1] == "not run yet"


def test_without_runs_every_claim_is_not_run_yet():
    of_claims = findings.summaries(claims.all_findings([]), 5)[1:]
    assert [row[2] for row in of_claims] == ["not run yet"] * len(claims.CLAIMS)


@pytest.mark.slow
def test_the_pages_are_those_of_the_recorded_runs():
    found = claims.all_findings(recorded())
    for page, text in (
        (details.PAGE, details.page(recorded(), found)),
        (claims_by_memory.PAGE, claims_by_memory.page(recorded(), found)),
    ):
        assert page.read_text(encoding="utf-8") == text, "run results/studies/night/claims.py"


def test_the_note_on_the_protocol_has_the_span_of_replay_and_the_hours():
    note = (ROOT / "results" / "studies" / "night" / "README.md").read_text(encoding="utf-8")
    replay = findings.by_seed(night_runs.table_of(recorded()), "average")
    span = (replay["replay@100"] - replay["replay@4"]).mean()
    assert f"{span:.1f} in the runs, with five" in note
    plain_runs = [run for run in recorded() if not run.get("operations_like")]
    hours = sum(run["seconds"] for run in plain_runs) / 3600
    main = [run for run in plain_runs if night_runs.row_name(run) in night_runs.EIGHT and run["memory"]]
    hours_of_main = sum(run["seconds"] for run in main) / 3600
    assert len(main) == 320 and f"[{hours / 2:.1f} hours](" in note
    assert f"`exps/studies/night/main.json`, about {hours_of_main / 2:.0f}." in PAPER_PAGE.read_text(encoding="utf-8")


def test_the_page_counts_the_tasks_in_which_bic_loses_the_newest_classes():
    """Two of nine in one run, and none in the other; runs of one exemplar per class do not count."""
    runs = []
    for memory, newest in ((1, [0.0] * 9), (2, [0.0, 0.0, *[1.0] * 7]), (10, [5.0] * 9)):
        data = record("bic", memory).data
        later = [[*row[:-1], value] for row, value in zip(data["matrix"][1:], newest, strict=True)]
        runs.append(Record.of(data | {"matrix": [data["matrix"][0], *later]}))
    text = " ".join(details.of_bic(rows(*runs)).split())
    assert "11" in numbers_beside(text, "later tasks") and details.of_bic(rows(*runs[:1])) == ""


def test_a_detectable_difference_is_detected_in_four_of_five_repetitions():
    draws = np.random.default_rng(0)
    for seeds in (2, 3, 5):
        half_width = stats.t.isf(0.025, seeds - 1) / seeds**0.5  # of a sample with a standard deviation of 1
        repetitions = draws.normal(findings.detectable(seeds) * half_width, 1, (100_000, seeds))
        detected = ttest_1samp(repetitions, 0, axis=1).confidence_interval(0.95).low > 0
        assert detected.mean() == pytest.approx(0.8, abs=0.01)
    finding = findings.finding(replace(A_OVER_B, shares=(4,)), table(shifted([1, 2, 3, 2, 2])))
    half = np.diff(ttest_1samp([1, 2, 3, 2, 2], 0).confidence_interval(0.95))[0] / 2
    assert findings.summary(finding, 5)[5] == f"{1.355 * half:.2f}"


@pytest.mark.slow
def test_the_detailed_page_has_the_accuracies_of_other_settings():
    """Finetune without memory alone, and ahead of all others there, as the page says."""
    runs = []
    for seed in range(5):
        for method, memory, exemplars, average in (
            ("finetune", 0, "herding", 20.0),
            ("replay", 0, "herding", 10.0),
            ("replay", 10, "reservoir", 30.0),
        ):
            data = record(method, memory, seed=seed, exemplars=exemplars).data
            runs.append(Record.of(data | {"avg_acc": average + seed}))
    cells = {row[0]: row[1:] for row in details.in_other_settings(night_runs.table_of(rows(*runs)))}
    half = stats.t.isf(0.025, 4) * np.std(range(5), ddof=1) / 5**0.5
    assert cells["Finetune"] == [f"22.00 ± {half:.2f}", *[""] * 6]
    assert cells["Replay"][0] == f"12.00 ± {half:.2f}" and cells["Replay"][5] == f"32.00 ± {half:.2f}"
    assert cells["Replay"][1:5] == ["not run yet"] * 4
    recorded_rows = details.in_other_settings(night_runs.table_of(recorded()))
    means = [float(row[1].split()[0]) for row in recorded_rows]
    assert len(means) == 9 and max(means) == means[0]


def runs_with(values, **columns):
    """A table of runs from {row: (average of each seed, training accuracy, training images, classes)}, at 40 %."""
    tables = []
    for row, (averages, trained, images, classes) in values.items():
        measures = {"newest": 1.0, "trained": trained, "images": images, "classes": classes}
        tables.append(table({row: {40: averages}}, **measures | columns))
    runs = pd.concat(tables)
    runs["newest"] += runs["average"]
    return runs


SAME, HIGHER = [20.0, 21.0, 22.0, 23.0, 24.0], [22.0, 23.1, 24.2, 25.1, 26.2]
NEAR = [20.1, 20.9, 22.0, 23.1, 23.9]
WITH_RESET = {"wsc": (HIGHER, 99, 10, 50), "wsc reset=none": (SAME, 99, 10, 50)}
WITHOUT_GAIN = {"wsc": (NEAR, 99, 10, 50), "wsc reset=none": (SAME, 99, 10, 50)}
OF_RULES = findings.Claim("Blending is ahead of A", [("wsc",)], [("wsc reset=a",)], (40,))


@pytest.mark.parametrize(
    "claim, values, why",
    [
        (replace(A_OVER_B, measure="newest"), {"a": (HIGHER, 94, 10, 50), "b": (SAME, 99, 10, 50)}, "training"),
        (replace(A_OVER_B, measure="newest"), {"a": (HIGHER, 95, 10, 50), "b": (SAME, 99, 10, 50)}, ""),
        (A_OVER_B, {"a": (HIGHER, 50, 10, 50), "b": (SAME, 50, 10, 50)}, ""),
        (A_OVER_B, {"a": (HIGHER, 50, 30, 50), "b": (SAME, 50, 10, 50)}, "schedule"),
        (A_OVER_B, {"a": (HIGHER, 50, 30, 50), "b": (SAME, 97, 10, 50)}, ""),
        (A_OVER_B, {"a": (HIGHER, 50, 10, 50), "b": (SAME, 50, 30, 50)}, ""),
        (A_OVER_B, {"a": (SAME, 50, 10, 50), "b": (HIGHER, 50, 30, 50)}, "schedule"),
        (A_OVER_B, {"a": (HIGHER, 99, 10, 40), "b": (SAME, 99, 10, 50)}, "classes"),
        (replace(A_OVER_B, plus=[("joint",)]), {"joint": (SAME, 60, 10, 50), "b": (HIGHER, 99, 10, 50)}, "training"),
        (OF_RULES, WITHOUT_GAIN | {"wsc reset=a": (SAME, 99, 10, 50)}, "reset"),
        (OF_RULES, WITHOUT_GAIN | {"wsc reset=a": ([10.0] * 5, 99, 10, 50)}, ""),
        (OF_RULES, WITH_RESET | {"wsc reset=a": (NEAR, 99, 10, 50)}, ""),
        (replace(OF_RULES, minus=[("replay",)]), WITHOUT_GAIN | {"replay": (SAME, 99, 10, 50)}, ""),
    ],
)
def test_a_claim_that_the_runs_cannot_decide_is_not_tested(monkeypatch, claim, values, why):
    monkeypatch.setattr(findings, "RESET_GAIN", replace(findings.RESET_GAIN, shares=(40,)))
    finding = findings.finding(replace(claim, shares=(40,)), runs_with(values))
    assert finding.untested == why
    assert (finding.verdict == "not tested here") == bool(why) and finding.outcome != "not tested here"


@pytest.mark.slow
def test_the_page_says_why_claims_are_not_tested_and_which_verdicts_may_be_due_to_chance():
    runs = night_runs.table_of(recorded())
    all_findings = [findings.finding(claim, runs) for claim in claims.CLAIMS]
    text = details.PAGE.read_text(encoding="utf-8")
    _, lines = rows_after(details.PAGE, "## All claims")
    verdicts = {re.sub(r" \((added|above|-?[\d.]+ to).*", "", line[0]): line[2] for line in lines}
    assert len(verdicts) == len(lines) == len(all_findings)
    tested, reasons = {}, set()
    for finding in all_findings:
        verdict = verdicts[finding.claim.text]
        if finding.untested:
            reasons.add(finding.untested)
            assert verdict == f"not tested here: {finding.untested}"
        elif finding.claim.accepts == (0, inf):
            tested[finding.claim.text] = ttest_1samp(finding.seeds, 0).pvalue
    assert reasons == set(re.findall(r"^- \*(\w+)\*: the (?:claim|better|runs)", text, re.MULTILINE))
    ordered = sorted(tested, key=tested.get)
    rejected = 0
    while rejected < len(ordered) and tested[ordered[rejected]] <= 0.05 / (len(ordered) - rejected):
        rejected += 1
    fallen = {name for name in ordered[rejected:] if tested[name] <= 0.05}
    assert {name for name, verdict in verdicts.items() if verdict.endswith(", not by Holm")} == fallen
    assert str(len(tested)) in numbers_beside(text, "Holm's correction")


def test_the_page_of_claims_has_those_of_the_small_protocol_that_stand_as_they_are_on_the_detailed_page():
    _, all_claims = rows_after(details.PAGE, "## All claims")
    _, standing = rows_after(ROOT / "docs/claims.md", "<!-- records: claims of the small protocol -->")
    assert len(standing) == len(claims.STANDING) == 6
    assert [row for row in all_claims if row in standing] == standing
    assert not any("not tested" in row[2] for row in standing)


def test_the_detailed_page_begins_with_the_training_accuracies_of_the_runs_and_of_the_papers_schedule():
    last, full = {}, []
    for run in recorded():
        if run["memory"] == 25 and "trained_10" in run and night_runs.row_name(run) in details.TRAINED:
            last.setdefault(night_runs.row_name(run), []).append(run["trained_10"])
    for memory in (20, 200):
        run = json.loads((ROOT / f"results/studies/cifar100_paper_schedule/replay-m{memory}.json").read_text())
        full += [task[-1] for task in run["train_accuracy"][1:]]
    _, paragraph, *_ = details.PAGE.read_text(encoding="utf-8").split("\n\n")
    accuracies = [f"{np.mean(last[row]):.0f}" for row in details.TRAINED]
    assert numbers_beside(paragraph, "training accuracy") == accuracies
    assert numbers_beside(paragraph, "the paper's schedule") == [f"{min(full):.1f}"]
    assert min(full) > findings.CONVERGED > max(map(np.mean, last.values()))


def test_the_command_on_top_of_the_page_has_the_runs_of_the_claim():
    text = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    settings = json.loads((NIGHT / "ablation.json").read_text()) | {"memory_per_class": 1}
    runs = [run for run in load(NIGHT / "ablation.json") if run.memory_per_class == 1]
    assert (
        len(runs) == 20
        and "exps/studies/night/ablation.json --set memory_per_class=1" in text
        and len(settings["seed"]) == 5
    )
    averages = findings.by_seed(night_runs.table_of(recorded()), "average")
    gains = averages["wsc@4"] - averages["replay@4"]
    low, high = ttest_1samp(gains, 0).confidence_interval(0.95)
    assert f"{gains.mean():+.2f} ± {gains.sem():.2f} points" in text
    assert f"{(high - low) / 2:.2f}" in numbers_beside(text, "95 % interval")


def test_the_table_of_imagenet100_has_cells_of_all_seeds(tmp_path, monkeypatch):
    """Means and standard errors of the average accuracies; one seed is missing of DER."""
    runs = []
    for method, seed, average in (
        *(("replay", seed, 10.0 + seed) for seed in range(3)),
        ("der", 0, 7.0),
        ("der", 1, 8.0),
    ):
        result = synthetic.result(method, 60, seed=seed) | {"avg_acc": average}
        runs.append((f"{method} {seed}", Record.of(result)))
    monkeypatch.setattr(imagenet100, "RUNS", tmp_path / "imagenet100.csv")
    assert imagenet100.rows() == []
    add(runs, imagenet100.RUNS)
    header, *lines = imagenet100.rows()
    assert header == ("method", "8 per class", "20 per class", "60 per class", "100 per class")
    cells = {row[0]: row[1:] for row in lines}
    assert cells.pop("Replay") == (*["not run yet"] * 2, "11.00 ± 0.58", "not run yet")
    assert set().union(*cells.values()) == {"not run yet"} and len(cells) == 7


def test_all_runs_of_the_file_are_recorded_and_the_page_says_how_long_they_took():
    recorded_runs = read(imagenet100.RUNS)
    planned_runs = load(imagenet100.CONFIG)
    assert len(planned_runs) == len(recorded_runs) == 96
    assert {(run["method"], run["memory"], run["seed"]) for run in recorded_runs} == {
        (run.method, run.memory_per_class, run.seed) for run in planned_runs
    }
    hours = sum(run["seconds"] for run in recorded_runs) / 2 / 3600
    assert numbers_beside(PAPER_PAGE.read_text(encoding="utf-8"), "hours of two cores") == ["96", f"{hours:.1f}"]


def test_the_figure_shows_the_gains_over_replay_of_equal_seeds():
    gains, runs = (3.0, 4.0, 6.0, 4.0, 3.0), []
    for method, memory, seed in [*itertools.product(("replay", "wsc"), (1, 25), range(5)), ("der", 1, 0)]:
        average = 30.0 + 5 * seed + (gains[seed] if method == "wsc" else 0)
        if (method, memory, seed) != ("wsc", 25, 4):
            runs.append(Record.of(record(method, memory, seed=seed).data | {"avg_acc": average}))
    shown = claims_figure.gains(rows(*runs))
    test = ttest_1samp(gains, 0).confidence_interval(0.95)
    assert list(shown["here"]) == ["wsc"] and list(shown["here"]["wsc"]) == [4], "with all seeds only"
    assert shown["here"]["wsc"][4] == pytest.approx([4.0, (test.high - test.low) / 2], abs=1e-4)
    assert shown["the paper"]["wsc"][4] == [pytest.approx(52.16 - 48.63, abs=0.005), 0]


@pytest.mark.slow
def test_the_figure_is_that_of_the_recorded_runs(tmp_path):
    runs = recorded()
    assert shown_in(claims.IMAGE) == json.loads(json.dumps(claims_figure.gains(runs))), (
        "run results/studies/night/claims.py"
    )
    claims_figure.draw(tmp_path / "figure.svg", runs)
    assert shown_in(tmp_path / "figure.svg") == shown_in(claims.IMAGE)


def test_numbers_with_an_interval_on_the_readme_are_those_of_the_pages():
    """Those are compared with the records by other tests."""
    number = re.compile(r"\d+\.\d+ ± \d+\.\d+")
    known = set()
    for page in (ROOT / "docs").glob("*.md"):
        known |= set(number.findall(page.read_text(encoding="utf-8")))
    said = set(number.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert said <= known, said - known


@pytest.mark.slow
def test_the_night_files_are_complete():
    """``all.json`` has the runs of the others, with the paper's fractions of memory, and every claim has its runs."""
    second = {"equal_operations", "imagenet100", "averaging"}  # tables of their own
    files = {path.stem: path for path in NIGHT.glob("*.json") if not path.stem.startswith("trials")}
    runs = {name: load(path) for name, path in files.items() if name not in second}
    folders = {
        name: Counter(json.dumps(config.to_dict(), sort_keys=True) for config in configs)
        for name, configs in runs.items()
    }
    everything = folders.pop("all")
    assert set(everything) == set().union(*folders.values())
    assert set(everything.values()) == {1}, "runs that tables share are done once"
    assert {100 * config.memory_per_class / 25 for config in runs["main"]} == set(findings.SHARES)
    cells = Counter(f"{night_runs.row_name(planned(config))}@{4 * config.memory_per_class}" for config in runs["all"])
    assert set(cells.values()) == {night_runs.SEEDS}
    assert {cell for claim in claims.CLAIMS for cell in claim.cells()} <= cells.keys()
    _, papers = rows_after(PAPER_PAGE, "# The paper's tables and figures")
    _, small = rows_after(PAPER_PAGE, "All tables take about")
    not_in_the_paper = {"`exps/paper/table_t50.json`", "`exps/paper/wsc_literal.json`", "`exps/paper/paper_text.json`"}
    assert {row[1] for row in papers} - not_in_the_paper == {row[1] for row in small} - {""}
    counts = {Path(file.strip("`")).stem: int(count.replace(",", "")) for _, _, file, count in small}
    runs |= {name: load(files[name]) for name in second}
    assert counts == {name: len(configs) for name, configs in runs.items()}


def test_fresh_weights_are_trained_as_replays_are():
    """In the night's file of the training loss, and in the paper's."""
    for file in (NIGHT / "training_loss.json", ROOT / "exps" / "paper" / "figure_training_loss.json"):
        keys = ("epochs", "milestones", "lrate", "lrate_decay", "weight_decay", "batch_size", "optimizer", "scheduler")
        schedules = {(run.model_name, *(getattr(run, key) for key in keys)) for run in load(file)}
        (joint, *ours), (replay, *theirs) = sorted(schedules)
        assert (joint, replay) == ("joint", "replay") and ours == theirs


def planned(config):
    """The row of a run that is yet to come."""
    tasks = min(config.max_tasks, 100 // config.increment)
    result = some_result(tasks * config.increment, config.increment) | {"config": config.to_dict()}
    return rows(Record.of(result))[0]


@functools.cache
def some_result(classes, increment):
    return synthetic.result(classes=classes, increment=increment, losses=1)
