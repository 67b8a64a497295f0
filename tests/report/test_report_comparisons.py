"""What may be compared, and the statistics of a comparison."""

from pathlib import Path

import pytest
from support import synthetic
from support.synthetic import HERE, accuracy, lines_of, names_of, record

from pycil_wsc import registry, report
from pycil_wsc.config.image_config import KEYS
from pycil_wsc.keys import having
from pycil_wsc.report import __main__ as command
from pycil_wsc.report.groups import Options, group_runs

STUDIES = Path(__file__).parents[2] / "results" / "studies"


# ---- what may be compared --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_another_schedule_stand_in_a_comparison_of_their_own(tmp_path, undrawn):
    folders = [STUDIES / name for name in ("cifar100_short", "cifar100_short_all", "cifar100_short_study")]
    report.write_report(*folders, out=tmp_path)
    (reset,) = (tmp_path / "tables").glob("reset-rule-*.csv")
    lines = lines_of(tmp_path, reset.stem)
    assert {line["wsc.reset"]: line["averaged_over"] for line in lines if line["mean"]} == {
        rule: "1"
        for rule in (*("random", "revert", "shrink_perturb", "continual_backprop"), "blend without averaging", "blend")
    }
    accuracies = {path.stem: lines_of(tmp_path, path.stem) for path in (tmp_path / "tables").glob("accuracy-*.csv")}
    methods = {slug: {line["method"].split()[0] for line in lines} for slug, lines in accuracies.items()}
    assert methods == {
        f"accuracy-{HERE}-init_epoch40": {"replay", "wa", "wsc"},
        f"accuracy-{HERE}-init_epoch20": {"der", "foster", "memo", "replay", "icarl", "bic", "wa", "wsc"},
    }


def test_methods_with_epochs_of_their_own_are_compared_where_each_has_one_schedule():
    epochs = {"replay": (200, 70), "bic": (170, 170), "der": (200, 170), "wsc": (200, 70)}
    runs = [record(name, init_epoch=first, epochs=later) for name, (first, later) in epochs.items()]
    assert len(group_runs(runs)[0]) == 1
    short = [record(name, init_epoch=20, epochs=4) for name in epochs]
    groups = group_runs([*runs, *short])[0]
    assert [{member.method for member in group.records} for group in groups] == [set(epochs)] * 2
    assert sorted(group.conditions["init_epoch"] for group in groups) == [20, 200]


def test_what_is_compared_does_not_depend_on_the_order_of_the_folders():
    """Two methods have as many schedules and runs, of which one has to be the measure."""
    epochs = [("replay", 200, 70), ("replay", 20, 7), ("icarl", 200, 170), ("icarl", 200, 70)]
    runs = [record(name, init_epoch=first, epochs=later) for name, first, later in epochs]

    def comparisons(records):
        groups = group_runs(records)[0]
        members = [sorted((member.method, member.config["epochs"]) for member in group.records) for group in groups]
        return [*zip(members, (group.variants_of for group in groups))]

    assert comparisons(runs) == comparisons(runs[::-1])


def test_a_method_trained_in_a_way_of_its_own_stands_beside_its_other_runs_alone():
    runs = [record("replay"), record("wsc"), record("replay", lrate=0.3)]
    main, apart = group_runs(runs)[0]
    assert {member.method for member in main.records} == {"replay", "wsc"} and apart.variants_of == ["replay"]
    assert sorted(names_of(apart).values()) == ["replay lrate=0.1", "replay lrate=0.3"]


def test_a_row_that_differs_in_more_than_the_studys_subject_is_never_bold(tmp_path, undrawn):
    runs = [synthetic.result("wsc", 20, seed, wsc__reset=rule) for seed in (1, 2) for rule in ("blend", "revert")]
    for made in runs:
        made["avg_acc"] = 60.0 + made["config"]["seed"] + (made["config"]["wsc.reset"] == "blend")
    odd = [synthetic.result("wsc", 20, seed, wsc__reset="random", wsc__betas=[0.5, 0.9]) for seed in (1, 2)]
    for number, made in enumerate(odd):
        made["avg_acc"] = 99.0 + number / 100
    synthetic.write(tmp_path, *runs, *odd)
    folder = report.write_report(tmp_path).parent
    bold = {line["wsc.reset"]: line["best"] for line in lines_of(folder, f"reset-rule-{HERE}")}
    assert bold["random"] == "0" and "1" in bold.values()
    assert "Not compared" in (folder / "tables" / f"reset-rule-{HERE}.md").read_text()


def test_the_keys_that_methods_have_defaults_of_their_own_for_do_not_part_comparisons():
    defaults = {name: registry.learner_defaults[name] for name in registry.learner_defaults}
    # The rates, batches or heads of these differ from all others', and RMM counts its memory in total: so their tables
    # are their own.
    apart = {"fetril", "gdumb", "rmm-icarl", "rmm-foster", "mer", "lucir", "slca", "slca_cofima", "dgr", "duct"}
    apart |= {name for name, keys in defaults.items() if "convnet_type" in keys}  # another table anyway
    keys = {key for name in defaults.keys() - apart for key in defaults[name] if key in KEYS}
    assert keys <= set(having(KEYS, by_method=True))


# ---- statistics ------------------------------------------------------------------------------------------------------


def with_average(method, seed, value):
    return synthetic.result(method, 20, seed) | {"avg_acc": value}


def test_the_csv_has_each_seed_and_both_spreads_and_a_switch_chooses_what_is_shown(tmp_path, undrawn):
    synthetic.write(
        tmp_path, *(with_average("replay", seed, value) for seed, value in ((1, 50.0), (2, 52.0), (3, 57.0)))
    )
    folder = report.write_report(tmp_path, options=Options(spread="sd")).parent
    (line,) = accuracy(folder, method="replay")
    assert (line["seed_1"], line["seed_2"], line["seed_3"]) == ("50.0", "52.0", "57.0")
    assert float(line["standard_deviation"]) == pytest.approx(13**0.5)
    assert float(line["standard_error"]) == pytest.approx((13 / 3) ** 0.5)
    text = (folder / "tables" / f"accuracy-{HERE}.md").read_text()
    assert "53.00 ± 3.61" in text and "Mean ± standard deviation over 3 seeds." in text
    assert "The paper's values, with ± standard error, are in brackets or below ours." in text


@pytest.mark.parametrize(
    "wsc, bold",
    [((51.0, 53.0, 58.0), {"wsc"}), ((50.5, 51.0, 59.0), {"wsc", "replay"}), ((50.0, 52.0, 57.0), {"wsc", "replay"})],
)
def test_bold_are_the_best_and_all_that_the_paired_error_does_not_tell_from_it(wsc, bold, tmp_path, undrawn):
    """Replay's accuracies spread far more than the differences: only pairs of equal seeds tell the two apart.

    WA is behind both.
    """
    runs = [with_average("replay", seed, value) for seed, value in ((1, 50.0), (2, 52.0), (3, 57.0))]
    runs += [with_average("wsc", seed, value) for seed, value in enumerate(wsc, 1)]
    runs += [with_average("wa", seed, min(wsc[seed - 1], runs[seed - 1]["avg_acc"]) - 9) for seed in (1, 2, 3)]
    synthetic.write(tmp_path, *runs, with_average("finetune", 1, 99.0))
    folder = report.write_report(tmp_path).parent
    assert {line["method"] for line in accuracy(folder, column="20") if line["best"] == "1"} == bold


def test_where_no_row_is_ahead_of_another_none_is_bold_and_the_report_says_why(tmp_path, undrawn):
    """Two seeds hardly ever tell two methods apart."""
    runs = [with_average("replay", seed, value) for seed, value in ((1, 50.0), (2, 52.0))]
    runs += [with_average("wsc", seed, value) for seed, value in ((1, 53.0), (2, 60.0))]
    synthetic.write(tmp_path, *runs)
    folder = report.write_report(tmp_path).parent
    assert {line["best"] for line in accuracy(folder, column="20")} == {"0"}
    text = (folder / "tables" / f"accuracy-{HERE}.md").read_text()
    assert "None is in bold, because no row is ahead of another" in text and "Bold:" not in text


def test_a_row_with_two_lucky_seeds_hides_no_row_that_is_ahead_of_all(tmp_path, undrawn):
    """Replay's mean is the highest, but WSC is ahead of it in both seeds, and of WA in all five."""
    averages = {
        "replay": (40.0, 41.0),
        "wsc": (42.0, 43.2, 30.0, 31.0, 32.0),
        "wa": (39.5, 40.4, 28.0, 29.1, 30.2),
    }
    runs = [with_average(name, seed, value) for name, values in averages.items() for seed, value in enumerate(values)]
    synthetic.write(tmp_path, *runs)
    folder = report.write_report(tmp_path).parent
    assert {line["method"] for line in accuracy(folder, column="20") if line["best"] == "1"} == {"wsc"}


def test_the_baseline_is_chosen(tmp_path, capsys, undrawn):
    synthetic.write(tmp_path, *(with_average(name, 1, value) for name, value in (("wa", 60.0), ("replay", 50.0))))
    assert command.main([str(tmp_path), "--baseline", "wa"]) == 0
    (line,) = lines_of(tmp_path / "report", f"difference-{HERE}")
    assert (line["method"], line["mean"], line["averaged_over"]) == ("replay", "-10.0", "1")
    assert command.main([str(tmp_path), "--baseline", "nobody"]) == 2
    assert "--baseline nobody: no method or row of the table" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, row",
    [
        ("replay", "replay weight_decay=0.1"),
        ("Replay", "replay weight_decay=0.1"),
        ("replay weight_decay=0.2", "replay weight_decay=0.2"),
        ("Replay weight_decay=0.2", "replay weight_decay=0.2"),
        ("Mine", "Mine"),
        ("wsc", "Mine"),
    ],
)
def test_the_baseline_is_a_method_or_a_row_as_configured_or_as_displayed(name, row, tmp_path, undrawn):
    runs = [synthetic.result("replay", 20, seed, weight_decay=decay) for seed, decay in ((1, 0.1), (2, 0.1), (1, 0.2))]
    synthetic.write(tmp_path, *runs, synthetic.result("wsc", 20, 1, label="Mine"))
    assert command.main([str(tmp_path), "--baseline", name]) == 0
    methods = {line["method"] for line in lines_of(tmp_path / "report", f"difference-{HERE}")}
    assert methods == {"replay weight_decay=0.1", "replay weight_decay=0.2", "Mine"} - {row}


def test_a_method_that_is_not_in_the_table_of_accuracies_is_no_baseline(tmp_path, capsys, undrawn):
    synthetic.write(tmp_path, *(synthetic.result(name, 20) for name in ("replay", "joint")))
    assert command.main([str(tmp_path), "--baseline", "joint"]) == 2
    error = "error: --baseline joint: no method or row of the table of average accuracies; available: replay\n"
    assert capsys.readouterr().err == error


def test_without_the_paper_none_of_its_numbers_are_shown(tmp_path, undrawn):
    synthetic.write(tmp_path, synthetic.result("replay", 20))
    assert command.main([str(tmp_path), "--no-paper"]) == 0
    (line,) = accuracy(tmp_path / "report")
    assert line["paper_mean"] == "" and ">48.63" not in (tmp_path / "report" / "index.html").read_text()
