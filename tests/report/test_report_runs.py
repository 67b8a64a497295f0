"""Which results are one run, where runs are found, and in which tables they stand."""

import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import synthetic
from support.odd_names import ODD
from support.synthetic import HERE, accuracy, lines_of, names_of, record

from pycil_wsc import registry, report
from pycil_wsc.config.image_config import KEYS
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.data_options import ALL
from pycil_wsc.keys import Key
from pycil_wsc.report import __main__ as command
from pycil_wsc.report.groups import group_runs
from pycil_wsc.report.tables.builders import console_text, tables
from pycil_wsc.results import REPLACED, SCHEMA, Record, find_runs

STUDIES = Path(__file__).parents[2] / "results" / "studies"
NIGHT = Path(__file__).parent / "results_of_several_versions.jsonl.xz"  # one seed of the night's runs, without curves


# ---- the same run ----------------------------------------------------------------------------------------------------


def test_a_seed_counts_once_however_many_keys_an_older_record_lacks(tmp_path, undrawn):
    folders = [STUDIES / "cifar100_short_all", STUDIES / "cifar100_short_study"]
    page = report.write_report(*folders, out=tmp_path)
    (wsc,) = [
        line for line in lines_of(tmp_path, f"accuracy-{HERE}") if (line["method"], line["column"]) == ("wsc", "200")
    ]
    alone = json.loads((STUDIES / "cifar100_short_all" / "wsc-m200.json").read_text())
    assert (float(wsc["mean"]), wsc["averaged_over"], wsc["standard_error"]) == (alone["avg_acc"], "1", "")
    (left,) = re.findall(r"<code>([^<]*)</code>: the same run as \S*moment.json; counted once", page.read_text())
    assert left.endswith("wsc-m200.json")  # records fewer values
    assert not [path for folder in folders for path in folder.glob("report*")]


@pytest.mark.parametrize("method", sorted(set(registry.learners) - {"gss", "hal", "xder"}))  # which refuse fixed_memory
def test_the_report_takes_for_the_same_run_what_the_engine_does(method):
    """Two configurations have one identity exactly if the report's variants are equal."""
    options = {"bic": ["validation"]}.get(method, [])
    given = {"model_name": method, "precision": "fp32", "fixed_memory": True}
    others = [
        {"prefix": "x"},
        {"num_workers": 1},
        {"memory_size": 7},
        {"batch_size": 64},
        {"nme": False},
        {"label": "L"},
    ]
    others += [{"validation": "per_class", "memory_size": 7}] * bool(options) + [
        {"fixed_memory": False, "memory_per_class": 3}
    ]
    for other in others:
        pairs = [resolve(given | {k: v for k, v in other.items() if k == "fixed_memory"}), resolve(given | other)]
        made = [synthetic.result() | {"config": config.to_dict(), "precision": "fp32"} for config in pairs]
        first, second = (Record.of(contents).identity for contents in made)
        assert (pairs[0].identity() == pairs[1].identity()) == (first.variant == second.variant), other


def test_a_key_added_later_has_in_older_results_the_value_that_runs_had_then(monkeypatch):
    """For any default: the declaration decides."""
    added = Key("init_lr", float, 0.9, "", before=0.1)
    monkeypatch.setattr("pycil_wsc.results.old_schemas.KEYS", {**KEYS, "init_lr": added})
    older, newer, changed = record(), record(init_lr=0.1), record(init_lr=0.9)
    assert [len(group.records) for group in group_runs([older, newer])[0]] == [1]
    assert sorted(names_of(group_runs([older, changed])[0][0]).values()) == [
        "replay init_lr=0.1",
        "replay init_lr=0.9",
    ]


@pytest.mark.parametrize("name, place", [("batch_norm_parts", "shared"), ("epochs", "own"), ("wsc.retain", "own")])
def test_seeds_from_before_and_after_a_key_was_added_are_averaged(name, place):
    before, after = (synthetic.result("wsc", 20, seed, losses=1) for seed in (1993, 1994))
    now = Record.of(after).identity
    before |= {"schema": SCHEMA, "identity": Record.of(before).identity.model_dump()}
    assert before["identity"][place].pop(name) == KEYS[name].earlier
    assert getattr(Record.of(before).identity, place) == getattr(now, place)
    ((group,), _) = group_runs([Record.of(before), Record.of(after)])
    assert len(set(names_of(group).values())) == 1


def test_the_runs_of_the_small_protocol_are_one_comparison_but_for_fresh_weights():
    """They were made by several versions, which have other keys."""
    with lzma.open(NIGHT, "rt") as file:
        records = [Record.of(json.loads(line)) for line in file]
    records = [record for record in records if not record.config["operations_like"]]  # a comparison of their own
    assert len({record.data["commit"] for record in records}) > 1
    groups, problems = group_runs(records)
    fresh = [record for record in records if record.method == "joint" and record.config["epochs"] == 40]
    twenty = [record for record in records if len(record.curve) == 20]
    main, *others = sorted(groups, key=lambda group: -len(group.records))
    assert len(main.records) == len(records) - len(fresh) - len(twenty) and not problems
    # full retraining in Replay's schedule, for the training loss, is beside that in its own
    variants, tasks = sorted(others, key=lambda group: not group.variants_of)
    assert fresh and variants.variants_of == ["joint"]
    assert {record.method for record in variants.records} == {"joint"}
    assert twenty and set(tasks.records) == set(twenty)


def test_schedules_of_methods_that_the_paper_does_not_have_are_compared_apart(undrawn):
    results = [
        synthetic.result(method, seed=seed) for method in ("er_ace", "gdumb") for seed in (1, 2) for _ in (70, 35)
    ]
    for number, result in enumerate(results):
        result["config"] |= {"init_epoch": 200, "epochs": (70, 35)[number % 2]}
    groups, problems = group_runs([Record.of(result) for result in results])
    found = [sorted({record.config["epochs"] for record in group.records}) for group in groups]
    assert sorted(found) == [[35], [70]] and [len(group.records) for group in groups] == [4, 4] and not problems


def test_results_of_one_run_that_contradict_each_other_are_named(tmp_path, undrawn):
    one = synthetic.result("wsc", 20)
    (first,) = synthetic.write(tmp_path / "a", one)
    other = one | {"curve": [value - 1 for value in one["curve"]], "avg_acc": one["avg_acc"] - 1, "commit": "1" * 40}
    (again,) = synthetic.write(tmp_path / "b", other)
    page = report.write_report(tmp_path).read_text()
    assert f"<code>{again}</code>: contradicts {first}: the same configuration and seed, and another commit" in page
    assert lines_of(tmp_path / "report", f"accuracy-{HERE}")[0]["averaged_over"] == "1"


def test_of_two_results_of_one_run_the_fuller_counts(tmp_path, undrawn):
    """In either order, whether they agree or not."""
    one = synthetic.result("wsc", 20)
    other = one | {"curve": [value - 1 for value in one["curve"]], "avg_acc": one["avg_acc"] - 1}
    bare = {name: value for name, value in one.items() if name != "train_loss"}
    for number, (poorer, fuller, what) in enumerate([(bare, one, "the same run as"), (bare, other, "contradicts")]):
        for order in ((poorer, fuller), (fuller, poorer)):
            folder = tmp_path / f"{number}-{order[0] is fuller}"
            paths = synthetic.write(folder, *order)
            counted, left = paths if order[0] is fuller else paths[::-1]
            assert f"<code>{left}</code>: {what} {counted}" in report.write_report(folder).read_text()
            (line,) = lines_of(folder / "report", f"accuracy-{HERE}")
            assert float(line["mean"]) == fuller["avg_acc"]


def test_of_two_results_of_one_run_the_one_with_more_analyses_counts():
    one, two, three = (Record.of(synthetic.result("wsc", 20)) for _ in range(3))
    two.analyses.extend([{"task": 0, "share_new": 1.0, "drift": {}}, {"task": 1, "share_new": 0.5, "drift": {}}])
    three.analyses.extend([{"task": 0, "share_new": 1.0, "drift": {}}])
    ((group,), problems) = group_runs([one, two, three])
    assert group.records == [two] and len(problems) == 2


def test_the_precision_that_auto_was_identifies_a_run():
    auto = Record.of(synthetic.result(precision="auto") | {"precision": "bf16"})
    told = Record.of(auto.data | {"config": auto.config | {"precision": "bf16"}})
    assert [len(group.records) for group in group_runs([auto, told])[0]] == [1]


def test_a_result_that_was_set_aside_to_do_its_run_again_is_not_counted(tmp_path, undrawn):
    """Even if it records more values. It is read if it is named."""
    (path,) = synthetic.write(tmp_path, synthetic.result("replay", 20))
    new, old = json.loads(path.read_text()), path.with_name(REPLACED)
    old.write_text(json.dumps(new | {"avg_acc": new["avg_acc"] - 1, "more": 1, "values": 2}))
    page = report.write_report(tmp_path)
    assert float(lines_of(page.parent, f"accuracy-{HERE}")[0]["mean"]) == new["avg_acc"]
    assert REPLACED not in page.read_text() and [record.path for record in find_runs([old]).records] == [old]


WHOLE = {"data": {"train": 50_000}, "class_names": [str(number) for number in range(100)]}


def test_a_memory_of_all_images_is_not_that_of_as_many_exemplars():
    """500 images per class. Only where both exist does the name say which it is."""
    made = [(memory, seed) for memory in (20, 500, ALL) for seed in (1, 2)]
    records = [Record.of(synthetic.result("replay", memory, seed, losses=1) | WHOLE) for memory, seed in made]
    assert [record.memory for record in records[2:]] == [500] * 4
    ((group,), problems) = group_runs(records)
    assert not problems and len(group.records) == 6
    names = names_of(group)
    assert [names[one] for one in records] == ["replay"] * 4 + ["replay memory_per_class=all"] * 2
    ((group,), _) = group_runs(records[:2] + records[4:])
    assert set(names_of(group).values()) == {"replay"}


@pytest.mark.parametrize(
    "config, changes, memory",
    [
        ({}, {}, "500"),
        ({"validation_split": 0.1}, {}, "450"),
        ({"max_tasks": 2}, {"class_names": WHOLE["class_names"][:20]}, "all"),
        ({"max_tasks": 11}, {}, "500"),
        ({"classes": [3, 5]}, {"class_names": ["3", "5"]}, "all"),
        ({"images_per_class": 25}, {}, "25"),
        ({}, {"data": None}, "all"),
        ({}, {"class_names": None}, "all"),
    ],
)
def test_a_memory_of_all_images_is_as_large_as_the_classes_or_called_all(config, changes, memory, tmp_path, undrawn):
    """The recorded number of images is that of the whole data set, including classes that were not learned."""
    result = synthetic.result("replay", ALL, losses=1) | WHOLE | changes
    result["config"] |= config
    assert re.search(rf"exemplars +{memory}/class\n", report.result_table([result]))
    synthetic.write(tmp_path, result)
    report.write_report(tmp_path)
    (path,) = (tmp_path / "report" / "tables").glob("measures-*.csv")
    assert {line["exemplars per class"] for line in lines_of(tmp_path / "report", path.stem)} == {memory}


def test_no_odd_record_of_the_data_stops_the_report(tmp_path, undrawn):
    odd = [*ODD[1:], *({"train": value} for value in ODD)]
    runs = [synthetic.result("replay", ALL, seed, losses=1) | WHOLE | {"data": data} for seed, data in enumerate(odd)]
    synthetic.write(tmp_path, *runs)
    page = report.write_report(tmp_path).read_text()
    assert page.count("&#39;data&#39; is not as expected; left out") == len(odd)
    assert f'<a href="#problems">{len(odd)} problems</a>' in page and ">all</th>" in page


VARIED = {"batch_size": [64, 128], "epochs": [4, 70], "wsc.retain": [0.2, 0.5], "prefix": ["a", "b"], "T": [1.0, 2.0]}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["replay", "wsc", "own"]),
            st.sampled_from([20, 200]),
            st.sampled_from([1, 2]),
            st.dictionaries(st.sampled_from(sorted(VARIED)), st.integers(0, 1)),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_cell_of_any_table_has_a_seed_twice(runs):
    records = []
    for method, memory, seed, keys in runs:
        records.append(record(method, memory, seed, **{name: VARIED[name][i] for name, i in keys.items()}))
    found, doubles = group_runs(records)
    assert len({member for group in found for member in group.records}) + len(doubles) == len(records)
    for group in found:
        names = names_of(group)
        places = [(name, record.memory, record.seed) for record, name in names.items()]
        assert len(places) == len(set(places))


def test_methods_with_one_label_are_not_one_row():
    labelled = [record(method, 20, seed, label="ours") for method in ("replay", "er_ace") for seed in (1, 2)]
    ((group,), _) = group_runs(labelled)
    assert sorted(set(names_of(group).values())) == ["ours (er_ace)", "ours (replay)"]
    printed = console_text(group, ["replay", "er_ace"], True)
    assert "over 2 seeds" in printed and "ours (replay)" in printed and "ours (er_ace)" in printed


def test_a_run_that_no_study_shows_is_in_the_table_of_accuracies(tmp_path, undrawn):
    plain = [synthetic.result(method, 20) for method in ("replay", "wsc", "icarl")]
    studied = synthetic.result("wsc", 20, wsc__retain=0.5)
    others = synthetic.result("icarl+wsc", 20, wsc__retain=0.5)
    both = synthetic.result("wsc", 20, wsc__retain=0.5, wsc__reset_every="epoch")
    synthetic.write(tmp_path / "runs", *plain, studied, others, both)
    report.write_report(tmp_path / "runs", out=tmp_path / "report")
    shown = {line["method"] for line in lines_of(tmp_path / "report", f"accuracy-{HERE}")}
    assert shown == {"replay", "wsc", "icarl", "icarl+wsc wsc.retain=0.5", "wsc wsc.reset_every=epoch wsc.retain=0.5"}


def test_file_names_of_a_sweep_over_many_keys_are_no_longer_than_a_name_can_be():
    keys = ("batch_size", "init_lr", "lrate", "init_lr_decay", "lrate_decay", "momentum", "label_smoothing")
    keys += ("weight_decay", "init_weight_decay", "brightness", "min_lr", "backbone_lr_factor", "layer_decay")
    varied = [record(method, **{key: 0.125}) for key in keys for method in ("replay", "wsc")]
    groups, _ = group_runs([record(), record("wsc"), *varied])
    slugs = {group.slug for group in groups}
    assert len(slugs) == len(groups) > 5
    assert max(map(len, slugs)) <= 80 + len("-01234567-variants")


def test_names_of_files_have_whole_words_and_a_hash_for_what_is_missing():
    """They go into papers. Long values are left out, not cut."""
    classes = list(range(0, 40, 2))
    flowers = "folder:/home/me/experiments/2026/photographs-of-alpine-flowers-and-grasses"
    short, long, other = (
        record(dataset=name, images_per_class=200) for name in ("npz:/home/me/flowers.npz", flowers, flowers)
    )
    long.config["classes"], other.config["classes"] = classes, classes[::-1]
    names = [group_runs([one])[0][0].slug for one in (short, long, other)]
    assert names[0] == "flowers-b10-inc10-resnet32-images_per_class200"
    readable = "photographs-of-alpine-flowers-b10-inc10-resnet32-classes-images_per_class200"
    assert [re.sub("-[0-9a-f]{8}$", "", name) for name in names[1:]] == [readable] * 2
    assert len(set(names)) == 3


# ---- files and folders -----------------------------------------------------------------------------------------------


def test_files_may_be_named_instead_of_folders(tmp_path, capsys, undrawn):
    files = sorted(str(path) for path in (STUDIES / "cifar100_short").glob("*.json"))
    assert command.main([*files, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "" and len(accuracy(tmp_path / "out")) == 6
    assert command.main([files[0], files[0], "--out", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().err == ""


def test_a_loop_of_links_is_named(tmp_path, capsys, undrawn):
    synthetic.write(tmp_path, synthetic.result())
    loop = tmp_path / "loop" / "result.json"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    assert command.main([str(tmp_path)]) == 0
    assert f"problem: {loop}: cannot be read" in capsys.readouterr().err


def test_a_result_of_a_newer_version_says_so(tmp_path, undrawn):
    synthetic.write(tmp_path, synthetic.result(), synthetic.result(seed=2) | {"schema": 99})
    assert "schema 99, supported: 1 to 2); update pycil_wsc" in report.write_report(tmp_path).read_text()


# ---- each run in its place -------------------------------------------------------------------------------------------


def rows_of(group, slug):
    """``{row: mean}`` of a table with one memory size."""
    (table,) = (table for table in tables(group) if table.name == slug)
    return dict(zip(table.cells[table.labels[0]], table.cells["mean"]))


def test_choices_of_exemplars_of_ones_own_are_rows_and_no_reservoir():
    runs = [record(seed=seed, exemplars=name) for name in ("herding", "farthest", "reservoir") for seed in (1, 2)]
    ((group,), _) = group_runs(runs)
    means = {name: sum(run.average for run in runs[at : at + 2]) / 2 for at, name in ((0, ""), (2, "f"), (4, "r"))}
    assert rows_of(group, "accuracy") == pytest.approx({"replay": means[""], "replay exemplars=farthest": means["f"]})
    assert rows_of(group, "reservoir") == pytest.approx({"replay": means["r"]})


def test_a_method_whose_runs_all_have_a_key_of_a_study_is_in_the_table_of_all_methods():
    runs = [record("replay"), record("wsc"), record("derpp", exemplars="reservoir")]
    ((group,), _) = group_runs(runs)
    assert len(rows_of(group, "accuracy")) == 3


def test_equal_data_under_two_paths_are_one_row_and_a_run_under_both_counts_once():
    data = {"data": {"train": 9, "test": 3, "sha256": "a" * 64}}
    made = [
        Record.of(synthetic.result("replay", 20, seed, losses=1, dataset=f"npz:/home/{name}/flowers.npz") | data)
        for name, seed in (("ann", 1), ("ann", 2), ("bob", 3))
    ]
    older = {name: value for name, value in synthetic.result("replay", 20, 4, losses=1).items() if name != "data"}
    older = Record.of(older | {"config": older["config"] | {"dataset": "npz:/home/ann/flowers.npz"}})
    ((group,), problems) = group_runs([*made, older])
    assert len(rows_of(group, "accuracy")) == 1 and len(group.records) == 4 and not problems
    twice = Record.of(made[0].data | {"config": made[0].config | {"dataset": "npz:/home/bob/flowers.npz"}})
    ((group,), problems) = group_runs([*made, twice])
    assert len(group.records) == 3 and len(problems) == 1


def test_data_that_changed_under_one_path_have_titles_of_their_own():
    made = [
        Record.of(synthetic.result(losses=1) | {"data": {"train": 9, "test": 3, "sha256": content * 64}})
        for content in "ab"
    ]
    groups, _ = group_runs(made)
    assert [group.title.split(", data ")[1] for group in groups] == ["a" * 8, "b" * 8]
    assert len({group.slug for group in groups}) == 2


def test_a_run_that_two_sections_show_is_one_run(tmp_path, undrawn):
    synthetic.write(tmp_path, *(synthetic.result(*given, losses=1) for given in (("replay",), ("wsc",))))
    synthetic.write(tmp_path, synthetic.result("wsc", losses=1, lrate=0.2))
    groups, _ = group_runs(find_runs([tmp_path]).records)
    assert sum(len(group.records) for group in groups) > 3, "otherwise this shows nothing"
    assert "3 finished runs of 2 methods" in report.write_report(tmp_path).read_text()


def test_runs_behind_a_link_are_found_once(tmp_path):
    """A folder that was moved to a larger disk; a link may lead back, too."""
    synthetic.write(tmp_path / "disk" / "m20", synthetic.result(losses=1))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "m20").symlink_to(tmp_path / "disk" / "m20")
    (tmp_path / "disk" / "m20" / "up").symlink_to(tmp_path)
    found = find_runs([tmp_path / "runs"])
    assert len(found.records) == 1 and not found.problems
