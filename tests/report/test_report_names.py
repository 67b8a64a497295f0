"""Names of methods and data in a report, those from elsewhere, and the configuration on its page."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import synthetic
from support.synthetic import lines_of, names_of, record

from pycil_wsc import report
from pycil_wsc.errors import one_line
from pycil_wsc.report import __main__ as command
from pycil_wsc.report.figures.plots import figures
from pycil_wsc.report.groups import group_runs
from pycil_wsc.report.texts import dataset_names, method_name

# ---- names -----------------------------------------------------------------------------------------------------------


def test_labels_name_methods_and_data_sets(tmp_path, undrawn):
    synthetic.write(
        tmp_path,
        *(synthetic.result(name, 20, dataset="npz:/home/me/pets.npz") for name in ("replay", "icarl+wsc")),
        synthetic.result("wsc", 20, dataset="npz:/home/me/pets.npz", label="Ours <3"),
    )
    assert command.main([str(tmp_path), "--label", "icarl*=Second", "--label", "npz:*/pets.npz=Cats and dogs"]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    for name in ("Replay", "Second", "Ours &lt;3", "Cats and dogs, 10 tasks of 10 classes"):
        assert f">{name}" in page
    (text,) = (path.read_text() for path in (tmp_path / "report" / "tables").glob("accuracy*.tex"))
    assert r"Ours \textless{}3" in text
    assert command.main([str(tmp_path), "--label", "replay"]) == 2


def test_runs_of_other_memory_sizes_keep_their_own_labels():
    labelled = {(20, 1): "Ours, few", (200, 1): "Ours, many"}
    records = [record("wsc", memory, seed, label=name) for (memory, seed), name in labelled.items()]
    without = record("wsc", 200, 2)
    ((group,), _) = group_runs([*records, without])
    names = names_of(group)
    assert [names[one] for one in (*records, without)] == ["Ours, few", "Ours, many", "Ours, many"]
    assert group.shown("Ours, many") == "Ours, many"


def test_runs_that_differ_in_the_seed_alone_have_the_label_of_the_last_seed():
    """Which was edited while the sweep was extended."""
    runs = [record("wsc", seed=1993, label="ours"), record("wsc", seed=1994, label="ours (final)")]
    ((group,), _) = group_runs(runs[::-1])
    assert set(names_of(group).values()) == {"ours (final)"}


def test_a_data_set_is_named_by_no_more_of_its_path_than_tells_it_apart():
    assert dataset_names(["cifar100", "npz:/home/me/pets.npz", "folder:/data/a/birds/", "folder:/data/b/birds"]) == {
        "cifar100": "CIFAR-100",
        "npz:/home/me/pets.npz": "pets",
        "folder:/data/a/birds/": "a/birds",
        "folder:/data/b/birds": "b/birds",
    }
    assert method_name("icarl+wsc wsc.retain=0.5") == "iCaRL + WSC wsc.retain=0.5"


def test_no_path_is_a_title(tmp_path, undrawn):
    synthetic.write(tmp_path / "study", synthetic.result("replay", 20, dataset="npz:/home/me/pets.npz"))
    page = report.write_report(tmp_path / "study").read_text()
    assert "<h1>Report: study</h1>" in page and "<h2>pets, 10 tasks" in page


# ---- what comes from elsewhere ---------------------------------------------------------------------------------------

HOSTILE = "npz:/a/\n\\input{/etc/passwd}\n<script>x</script>=1+1\x00\x1b[31m\ud800.npz"


@pytest.mark.slow
def test_foreign_names_reach_no_file_as_anything_but_text(tmp_path, monkeypatch):
    monkeypatch.setattr("pycil_wsc.report.figures.style.FORMATS", {"svg": {"Date": None}})  # the others are no text
    two = ("curves", "confusion-m20")  # which have the names of methods and of classes
    monkeypatch.setattr("pycil_wsc.report.page.figures", lambda group: (p for p in figures(group) if p.slug in two))
    runs = [
        synthetic.result(name, 20, dataset=HOSTILE, classes=20) for name in ("=cmd|' /C calc'!A0", "@sum", "+1", "wsc")
    ]
    runs[-1] |= {"class_names": ["\udcff\x01" * 3] * 20, "device": "<b>\x07", "confusion": [[1] * 20] * 20}
    synthetic.write(tmp_path, *runs)
    folder = report.write_report(tmp_path).parent
    for path in (folder / "tables").glob("*.tex"):
        lines = path.read_text(encoding="utf-8").split("\n")
        assert not [line for line in lines if "input{" in line and not line.startswith("%")]
    for path in (folder / "tables").glob("*.md"):
        assert "<script" not in path.read_text(encoding="utf-8")
    for path in (folder / "tables").glob("*.csv"):
        cells = [
            cell for line in lines_of(folder, path.stem) for key, cell in line.items() if key in ("method", "column")
        ]
        assert cells and not [cell for cell in cells if cell[:1] in tuple("=+-@")]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "<script" not in page and "<b>\x07" not in page and "Failed tables and figures" not in page
    images = list((folder / "figures").glob("*.svg"))
    assert len(images) == 2
    for path in images:
        text = path.read_text(encoding="utf-8")
        assert not [c for c in text if ord(c) < 32 and c not in "\n\t\r"]


@settings(deadline=None)
@given(st.text(st.characters()))
def test_a_text_is_shown_on_one_printable_line_of_unicode(text):
    assert one_line(text).isprintable() and one_line(text).encode().decode() == one_line(text)
    assert one_line(text) == text or not text.isprintable()


def test_a_report_that_fails_costs_a_finished_sweep_nothing(tmp_path, capsys, monkeypatch):
    from pycil_wsc.launch import sweep

    def broken(folder):
        raise RuntimeError("out of ink")

    monkeypatch.setattr("pycil_wsc.report.write_report", broken)
    sweep.write_report(str(tmp_path))
    assert capsys.readouterr().err == f"error: the report of {tmp_path} failed: RuntimeError: out of ink\n"


# ---- the configuration -----------------------------------------------------------------------------------------------


def test_the_configuration_on_the_page_makes_the_same_runs_again(tmp_path, undrawn):
    from pycil_wsc.config.loading import load

    asked = {"model_name": ["replay", "wsc", "bic", "foster"], "memory_per_class": [20, 200], "seed": [1, 2]}
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(asked | {"epochs": 4, "budget": {"updates_like": "replay"}, "dataset": "digits"}))
    configs = load(path)
    made = [synthetic.result(c.model_name, c.memory_per_class, c.seed) | {"config": c.to_dict()} for c in configs]
    synthetic.write(tmp_path / "runs", *made[:-1])  # one is missing
    folder = report.write_report(tmp_path / "runs").parent
    (written,) = (folder / "configs").glob("*.json")
    again = load(written)
    assert sorted(json.dumps(config.identity()) for config in again) == sorted(
        json.dumps(config.identity()) for config in configs[:-1]
    )
    assert f"python main.py --config {written}" in (folder / "index.html").read_text()
