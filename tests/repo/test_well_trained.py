"""The runs that fit their data: each number of the pages, recomputed from table.csv with scipy, and made-up runs."""

import csv
import importlib
import json
import re
import sys
from collections import defaultdict
from math import inf
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.pages import rows_after, shown_in

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "studies" / "well_trained"
CLAIMS, RESULTS = ROOT / "docs" / "claims.md", ROOT / "docs" / "results.md"
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(FOLDER), *sys.path])
    well_trained = importlib.import_module("well_trained")

NAMES = {"replay": "Replay", "wsc": "WSC"}
NOISE, BATCH_NORM, AVERAGED = "Replay, other order", "Replay, batch norm recomputed", "averaging alone"
FRESH, TWICE = "fresh weights", "fresh weights, twice the epochs"


def recorded():
    """{(arm, memory): {seed: the line of its run}}, as csv reads them."""
    runs = defaultdict(dict)
    with open(FOLDER / "table.csv", newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            runs[line["label"] or NAMES[line["method"]], int(line["memory"])][int(line["seed"])] = line
    return runs


def measure(line, name):
    """A measure of a run."""
    if name == "among":
        return np.mean([float(line[f"among_newest_{task}"]) for task in (2, 3, 4, 5)])
    if name == "lowest":
        return min(float(line[f"fitted_{task}"]) for task in (1, 2, 3, 4, 5))
    return float(line[{"last": "accuracy_5", "among_last": "among_newest_5", "cost": "train_flops"}.get(name, name)])


def between(runs, arm, other, name="average"):
    """The differences of a measure between two (arm, memory) over the seeds that both have."""
    seeds = sorted(runs[arm].keys() & runs[other].keys())
    return [measure(runs[arm][seed], name) - measure(runs[other][seed], name) for seed in seeds]


def told(values, sign="+"):
    """The mean and its interval, as scipy has them."""
    if len(values) < 2:
        return f"{values[0]:{sign}.2f}" if values else ""
    mean = np.mean(values)
    return f"{mean:{sign}.2f} ± {half_width(values):.2f}"


def half_width(values):
    if np.ptp(values) == 0:
        return 0.0
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return (high - low) / 2


def alike(cell, expected):
    """Whether two texts are equal, but for the last digit of a number that lies halfway between two."""
    number = r"[+-]?\d+\.\d+"
    both = [[float(value) for value in re.findall(number, text)] for text in (cell, expected)]
    return re.sub(number, "", cell) == re.sub(number, "", expected) and both[0] == pytest.approx(both[1], abs=0.0101)


def has_power(detectable, values):
    """Whether the difference, as the page rounds it, is what four of five repetitions would show."""
    low, high = (power(float(detectable) + rounding, values) for rounding in (-0.006, 0.006))
    return low <= 0.8 <= high


def power(difference, values):
    """The probability that a t-test of as many pairs, as scattered as these, finds this difference."""
    limit, noncentrality = stats.t.isf(0.025, len(values) - 1), difference / stats.sem(values)
    return stats.nct.sf(limit, len(values) - 1, noncentrality)


def at_both(text, arm, other):
    return {(text, str(memory)): ((arm, memory), (other, memory), "average") for memory in (20, 100)}


COMPARED = {
    ("Memory reduces forgetting", "20 against 100"): (("Replay", 20), ("Replay", 100), "forgetting"),
    ("Memory lowers plasticity", "20 against 100"): (("Replay", 20), ("Replay", 100), "among"),
    ("Fresh weights are more plastic than Replay's", "100"): ((FRESH, 100), ("Replay", 100), "among_last"),
    ("Fresh weights in twice the epochs are more plastic", "100"): ((TWICE, 100), ("Replay", 100), "among_last"),
    ("WSC is more plastic than Replay", "100"): (("WSC", 100), ("Replay", 100), "among"),
    **at_both("WSC is ahead of Replay", "WSC", "Replay"),
    **at_both("Averaging alone is ahead of Replay", AVERAGED, "Replay"),
    **at_both("The reset adds to averaging alone", "WSC", AVERAGED),
    **at_both("Recomputed batch norm alone is ahead", BATCH_NORM, "Replay"),
}
COST = ("WSC costs what Replay does (0.9 to 1.1)", "20, 100")


def outcome(values, low, high):
    mean, half = np.mean(values), half_width(values)
    if low < mean - half and mean + half < high:
        return "seen"
    return "the opposite" if mean + half < low or mean - half > high else "not seen"


def holm(chances):
    """The names of {name: probability} that Holm's correction keeps."""
    ordered = sorted(chances, key=chances.get)
    for place, name in enumerate(ordered):
        if chances[name] > 0.05 / (len(ordered) - place):
            return set(ordered[:place])
    return set(ordered)


def chances_of(differences):
    return {name: stats.ttest_1samp(values, 0).pvalue for name, values in differences.items() if len(set(values)) > 1}


def test_each_claim_is_the_difference_of_its_runs():
    """Its mean and interval, the verdict with its seeds and Holm's correction, and the detectable difference."""
    runs = recorded()
    _, rows = rows_after(CLAIMS, "<!-- records: claims -->")
    claims = {tuple(row[:2]): row[2:] for row in rows}
    assert claims.keys() == {*COMPARED, COST} and len(rows) == len(claims)
    differences = {place: between(runs, *compared) for place, compared in COMPARED.items()}
    chances = chances_of(differences)
    lost = {place for place, chance in chances.items() if chance <= 0.05} - holm(chances)
    for place, values in differences.items():
        verdict, ours, _, detectable = claims[place]
        expected = "one seed" if values else "not run yet"
        if len(values) > 1:
            expected = outcome(values, 0, inf) + (", not by Holm" if place in lost else "")
            expected += f" ({len(values)} seeds)" if len(values) < 10 else ""
            assert has_power(detectable, values)
        else:
            assert detectable == ""
        assert verdict == expected and alike(ours, told(values)), place
    text = CLAIMS.read_text(encoding="utf-8")
    counts = sorted(map(len, differences.values()))
    seeds = " to ".join(dict.fromkeys([str(counts[0]), str(counts[-1])]))
    assert f"Seeds of a claim: {seeds} of 20." in text
    assert ("a verdict is preliminary" in text) == (counts[0] < 10)
    said = f"Holm's correction for {len(chances)} tests changes: {len(lost)}."
    assert said in text if chances else "Holm's correction for" not in text
    noise = [told(between(runs, (NOISE, memory), ("Replay", memory))) or "–" for memory in (20, 100)]
    assert f"{noise[0]} points with 20 %" in text and f"by {noise[1]} with 100 %" in text


def test_the_cost_is_that_of_the_operations():
    runs = recorded()
    ratios = defaultdict(list)
    for memory in (20, 100):
        for seed, line in runs["WSC", memory].items():
            if seed in runs["Replay", memory]:
                replay = measure(runs["Replay", memory][seed], "cost")
                ratios[seed].append(measure(line, "cost") / replay)
    means = [np.mean(values) for values in ratios.values() if len(values) == 2]
    _, rows = rows_after(CLAIMS, "<!-- records: claims -->")
    (row,) = (row for row in rows if tuple(row[:2]) == COST)
    assert row[3] == told(means, "")
    assert row[2].partition(" (")[0] == ("one seed" if len(means) == 1 else outcome(means, 0.9, 1.1))


def test_the_gate_comes_first_and_is_the_lowest_accuracy_on_the_training_images():
    text = CLAIMS.read_text(encoding="utf-8")
    assert text.index("<!-- records: gate -->") < text.index("<!-- records: claims -->")
    _, rows = rows_after(CLAIMS, "<!-- records: gate -->")
    expected = []
    for arm in ("Replay", FRESH, TWICE):
        lowest = [measure(line, "lowest") for line in recorded()[arm, 100].values()]
        if lowest:
            met = "met" if min(lowest) >= 95 else "missed"
            expected.append([arm, f"{min(lowest):.2f}", str(len(lowest)), met])
    assert rows == expected


def test_the_table_of_arms_has_replays_means_and_differences_from_them():
    runs = recorded()
    _, rows = rows_after(RESULTS, "<!-- records: arms -->")
    assert {(row[1], int(row[0])) for row in rows} <= runs.keys()
    differences = {}
    for memory, arm, *cells in rows:
        place, replay = (arm, int(memory)), ("Replay", int(memory))
        for column, name in enumerate(("average", "last", "among", "forgetting")):
            if arm == "Replay":
                values = [measure(line, name) for line in runs[place].values()]
                assert alike(cells[column], told(values, ""))
            else:
                values = between(runs, place, replay, name)
                bold = len(values) > 1 and abs(np.mean(values)) > half_width(values)
                assert alike(cells[column], f"**{told(values)}**" if bold else told(values))
                differences[place, name] = values
        lowest = min(measure(line, "lowest") for line in runs[place].values())
        ratios = [
            measure(line, "cost") / measure(runs[replay][seed], "cost")
            for seed, line in runs[place].items()
            if seed in runs[replay]
        ]
        assert cells[5:] == [f"{lowest:.2f}", f"{np.mean(ratios):.2f}", str(len(ratios))]
        if arm != "Replay" and len(ratios) > 1:
            assert has_power(cells[4], between(runs, place, replay))
    chances = chances_of(differences)
    told_apart = sum(chance <= 0.05 for chance in chances.values())
    said = f"Of the {len(chances)} differences with two seeds or more, {told_apart} exclude 0, and {len(holm(chances))}"
    assert (f"{said} still do" if chances else "No difference has two seeds yet.") in RESULTS.read_text(
        encoding="utf-8"
    )


def test_the_readme_has_the_gains_of_wsc_averaging_alone_and_the_reset():
    runs = recorded()
    compared = {
        "WSC minus Replay": ("WSC", "Replay"),
        "averaging alone minus Replay": (AVERAGED, "Replay"),
        "WSC minus averaging alone: the reset": ("WSC", AVERAGED),
        "noise: Replay with another order of the data": (NOISE, "Replay"),
    }
    header, rows = rows_after(ROOT / "README.md", "<!-- records: gains -->")
    assert header[1:] == ["20 % of the images in memory", "100 % of the images in memory"]
    for name, *cells in rows:
        arm, other = compared.pop(name)
        for memory, cell in zip((20, 100), cells, strict=True):
            assert alike(cell, told(between(runs, (arm, memory), (other, memory))) or "–")
    assert not compared


def test_the_figure_shows_the_gains_over_replay(tmp_path):
    runs = recorded()
    shown = shown_in(ROOT / "docs/images/well_trained.svg")
    for memory in (20, 100):
        gains = shown[f"{memory} %"]
        arms = {arm for arm, size in list(runs) if size == memory and between(runs, (arm, size), ("Replay", size))}
        assert gains.keys() == arms - {"Replay"}
        for arm, (mean, half) in gains.items():
            values = between(runs, (arm, memory), ("Replay", memory))
            assert mean == pytest.approx(np.mean(values), abs=1e-4)
            assert half == pytest.approx(half_width(values) if len(values) > 1 else 0, abs=1e-4)
    well_trained.draw(tmp_path / "figure.svg")
    assert shown_in(tmp_path / "figure.svg") == shown


# ---- made-up runs ----------------------------------------------------------------------------------------------------

EFFECTS = {"Replay": 0, NOISE: 0, BATCH_NORM: 0, AVERAGED: 2, "WSC": 5, FRESH: -3, TWICE: 3}  # on the average accuracy


def made_up(seeds, fitted=99.0):
    """Runs of all arms, scattered by half a point around means that differ by exactly the effects."""
    draws, runs = np.random.default_rng(0), []
    for arm, effect in EFFECTS.items():
        for memory in (100,) if arm in (FRESH, TWICE) else (20, 100):
            noise = draws.normal(0, 0.5, (seeds, 2))
            noise -= noise.mean(axis=0)
            for seed in range(seeds):
                run = {"method": "wsc", "label": arm, "memory": memory, "seed": seed, "images_trained": 1}
                among, average = noise[seed]
                run |= {f"among_newest_{task}": 80 + effect - memory / 20 + among for task in range(1, 6)}
                run |= {f"fitted_{task}": fitted for task in range(1, 6)} | {"accuracy_1": 50.0, "train_flops": 1e9}
                run |= {"average": 50 + seed + effect + average, "forgetting": 40 - memory / 10 + among}
                runs.append(run)
    return runs


@pytest.mark.parametrize("seeds, suffix", [(6, " (6 seeds)"), (12, "")])
def test_verdicts_are_those_of_the_truth_of_made_up_runs(monkeypatch, seeds, suffix):
    monkeypatch.setattr(well_trained, "recorded", lambda study: made_up(seeds))
    verdicts = {tuple(row[:2]): row[2] for row in well_trained.claims()[1:]}
    of_batch_norm = [verdicts.pop(("Recomputed batch norm alone is ahead", memory)) for memory in ("20", "100")]
    assert of_batch_norm == [f"not seen{suffix}"] * 2
    assert verdicts.pop(("Fresh weights are more plastic than Replay's", "100")) == f"the opposite{suffix}"
    assert set(verdicts.values()) == {f"seen{suffix}"}
    assert ("preliminary" in well_trained.below_claims()) == bool(suffix)


def test_claims_of_plasticity_are_not_tested_if_the_gate_is_missed(monkeypatch):
    monkeypatch.setattr(well_trained, "recorded", lambda study: made_up(12, fitted=94.0))
    verdicts = defaultdict(set)
    for text, _, verdict, *_ in well_trained.claims()[1:]:
        verdicts[verdict == "not tested here: training"].add(text)
    assert verdicts[True] == {text for text, _ in COMPARED if "plastic" in text}
    assert {row[-1] for row in well_trained.gate()[1:]} == {"missed"}


def test_the_paper_has_the_differences_of_its_tables():
    """By hand: of the main table, and of the ablation."""
    paper = {tuple(row[:2]): row[4] for row in well_trained.claims()[1:]}
    expected = {"WSC is ahead of Replay": (67.25 - 66.11, 78.16 - 77.02)}
    expected["Averaging alone is ahead of Replay"] = (66.50 - 65.12, 77.92 - 76.90)
    expected["The reset adds to averaging alone"] = (67.73 - 66.50, 78.25 - 77.92)
    for text, differences in expected.items():
        assert [paper[text, memory] for memory in ("20", "100")] == [f"{value:+.2f}" for value in differences]


def test_all_arms_of_the_file_are_compared():
    entries = json.loads((ROOT / "exps/studies/well_trained.json").read_text(encoding="utf-8"))["runs"]
    assert {entry.get("label") or NAMES[entry["model_name"]] for entry in entries} == {*EFFECTS} == {*well_trained.ARMS}
