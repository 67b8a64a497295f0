"""``python -m pycil_wsc.results``: a study's runs as one CSV table, and the tables of the night files."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from support import synthetic

from pycil_wsc.config.loading import load
from pycil_wsc.results.__main__ import main
from pycil_wsc.results.run_table import read

ROOT = Path(__file__).parents[2]
NIGHT = ROOT / "results" / "studies" / "night" / "table.csv"


def tabulated(*folders, out):
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return read(out)


@pytest.fixture
def runs(tmp_path):
    """A folder of two runs of four tasks, which differ in a key, and of a third with half as many."""
    results = [
        synthetic.result("wsc", 20, 1, classes=40, wsc__retain=0.1) | {"commit": "1234567e89" + "0" * 30 + "-dirty"},
        synthetic.result("wsc", 20, 2, classes=40) | {"widgets": [1, 2]},
        synthetic.result("replay", 5, 1, classes=20, label="1e5"),
    ]
    folder = tmp_path / "runs" / "made_up"
    synthetic.write(folder, *results)
    return folder


def test_each_run_is_a_row_with_four_digits_of_its_result(runs, tmp_path):
    rows = {row["run"]: row for row in tabulated(runs, out=tmp_path / "table.csv")}
    paths = list(runs.rglob("result.json"))
    assert len(rows) == len(paths) == 3
    for path in paths:
        result, row = json.loads(path.read_text()), rows[path.parent.relative_to(runs).as_posix()]
        for task, (accuracy, of_task) in enumerate(zip(result["curve"], result["matrix"], strict=True), 1):
            assert row[f"accuracy_{task}"] == pytest.approx(accuracy, rel=5e-4)
            assert row[f"newest_{task}"] == float(f"{of_task[-1]:.4g}")
        assert f"accuracy_{len(result['curve']) + 1}" not in row
        for column, name in (("average", "avg_acc"), ("newest", "new_acc"), ("forgetting", "forgetting")):
            assert row[column] == float(f"{result[name]:.7g}")
        last = [losses[-1] for losses in result["train_loss"][1:]]
        assert row["train_loss"] == pytest.approx(sum(last) / len(last), rel=5e-6)
        assert row["images_trained"] == pytest.approx(result["images_trained"], rel=5e-4)
        assert (row["method"], row["memory"], row["seed"]) == tuple(
            result["config"][name] for name in ("model_name", "memory_per_class", "seed")
        )


def test_the_columns_are_the_keys_in_which_runs_differ_and_what_a_method_recorded(runs, tmp_path):
    rows = tabulated(runs, out=tmp_path / "table.csv")
    assert {row["seed"]: row.get("wsc.retain") for row in rows if row["method"] == "wsc"} == {1: 0.1, 2: 0.2}
    assert [row["widgets"] for row in rows if "widgets" in row] == [1.5], "the mean"
    with open(tmp_path / "table.csv", newline="") as file:
        header = next(csv.reader(file))
    assert header[:5] == ["run", "method", "label", "memory", "seed"]
    assert not {"prefix", "dataset", "wsc.blend", "model_name"} & set(header), "the same in all runs, or said already"


def test_the_area_under_a_streams_curve_is_a_column_of_the_runs_that_have_one(runs, tmp_path):
    synthetic.write(runs, synthetic.result("er", 20, 1, classes=20) | {"anytime_auc": 12.3456789})
    rows = tabulated(runs, out=tmp_path / "table.csv")
    assert [row["anytime_auc"] for row in rows if "anytime_auc" in row] == [12.34568]


def test_a_commit_or_label_that_looks_like_a_number_is_none(runs, tmp_path):
    rows = tabulated(runs, out=tmp_path / "table.csv")
    assert {row["commit"] for row in rows} == {"1234567-dirty", "0000000"}
    assert [row["label"] for row in rows if "label" in row] == ["1e5"]


def test_a_table_keeps_the_runs_whose_folders_are_gone(runs, tmp_path):
    """And has those that are repeated once."""
    complete = tabulated(runs, out=tmp_path / "table.csv")
    text = (tmp_path / "table.csv").read_text()
    sorted(runs.rglob("result.json"))[0].unlink()
    assert tabulated(runs, out=tmp_path / "table.csv") == complete
    assert (tmp_path / "table.csv").read_text() == text


def test_without_a_finished_run_there_is_one_line_and_no_table(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "table.csv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no finished run of image classification" in line and not (tmp_path / "table.csv").exists()


def test_a_file_that_is_no_table_of_runs_is_one_line_and_stays(runs, tmp_path, capsys):
    other = tmp_path / "prices.csv"
    other.write_text("item,price\nmilk,1\n")
    assert main([str(runs), "--out", str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "prices.csv: is not a table of runs" in line and other.read_text() == "item,price\nmilk,1\n"


def test_a_result_that_cannot_be_read_is_told_and_the_others_are_in_the_table(runs, tmp_path, capsys):
    broken = sorted(runs.rglob("result.json"))[0]
    broken.write_text("{")
    assert main([str(runs), "--out", str(tmp_path / "table.csv")]) == 1
    assert str(broken) in capsys.readouterr().err and len(read(tmp_path / "table.csv")) == 2


def test_the_table_of_the_night_has_each_run_of_its_files_once():
    """By its method and memory and the keys of the table; those of one seed, of which the others have as many."""
    files = [ROOT / "exps/studies/night" / f"{name}.json" for name in ("all", "equal_operations")]
    configs = [config.to_dict() for file in files for config in load(file, {"seed": 1993})]
    every_row = read(NIGHT)
    assert set(Counter(row["seed"] for row in every_row).values()) == {221} and len(every_row) == 5 * 221
    rows = [row for row in every_row if row["seed"] == 1993]
    columns = {name for row in rows for name in row}
    keys = sorted(columns & {name for config in configs for name in config} - {"device", "precision"})
    assert {"seed", "increment", "exemplars", "wsc.retain", "wsc.reset", "wsc.average", "operations_like"} < {*keys}

    def named(values, method, memory):
        key_values = [values.get(name) for name in keys]
        return json.dumps([method, memory, *(float(value) if type(value) is int else value for value in key_values)])

    expected = {named(config, config["model_name"], config["memory_per_class"]) for config in configs}
    recorded = Counter(named(row, row["method"], row["memory"]) for row in rows)
    assert recorded.keys() == expected and set(recorded.values()) == {1}
    assert NIGHT.stat().st_size < 600_000
