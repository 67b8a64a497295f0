"""A first task shared by several runs is trained once, and only the recorded time differs."""

import importlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support import fresh
from support.small_runs import ROOT, command, killed_at, results, without_checkpoints, without_measurements

from pycil_wsc import files, registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import Unwritable
from pycil_wsc.keys import key
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs import first_task
from pycil_wsc.runs.run import Run

PLAIN = ["der", "finetune", "gem", "icarl", "joint", "magmax", "mas", "memo", "replay", "ties", "wa", "wise_ft", "wsc"]
WITH_EXEMPLARS = ["derpp", "er_ace", "rmm-icarl"]  # likewise, but they refuse to be without


def run(settings, **keys):
    config = resolve(settings | keys)
    return Run(config, Datasets().of(config))


def without_places(result):
    return without_measurements(result) | {"config": None}


def entries(settings):
    return list(Path(settings["out"], "first_tasks").glob("*.pt"))


def taken(result):
    """Whether the run took its first task from another one."""
    return result["train_seconds_spent"] < result["train_seconds"]


@pytest.mark.slow
def test_it_is_trained_once_for_all_methods_and_memories_with_the_same_results(settings, tmp_path):
    settings |= {"init_epoch": 1, "epochs": 1, "max_tasks": 2, "batch_size": 12, "checkpoint_seconds": 3600}
    alone = settings | {"cache_first_task": False, "out": str(tmp_path / "alone")}
    for name in PLAIN + WITH_EXEMPLARS:
        fewest = 1 if name in WITH_EXEMPLARS else 0
        for memory in (fewest, 4) if name in ("replay", "icarl", "wsc") else (4,):
            before = entries(settings)
            keys = {"model_name": name, "memory_per_class": memory, "fixed_memory": True, "memory_update": "task"}
            with without_checkpoints():
                with_cache = run(settings, **keys).execute()
                without = run(alone, **keys).execute()
            assert without_places(with_cache) == without_places(without), name
            assert taken(with_cache) == bool(before) and not taken(without)
    assert len(entries(settings)) == 1 and not entries(alone)


@pytest.mark.slow
def test_bic_shares_replays_first_task_where_the_schedules_are_equal(settings, tmp_path):
    """In any order: the first task does not depend on who trained it."""
    settings |= {"init_epoch": 2, "epochs": 1, "init_milestones": [], "max_tasks": 2, "checkpoint_seconds": 3600}
    settings |= {"init_weight_decay": 5e-4, "precision": "fp32"}
    alone = {
        name: run(settings, model_name=name, cache_first_task=False, out=str(tmp_path / "alone")).execute()
        for name in ("bic", "replay")
    }
    for names in (("bic", "replay"), ("replay", "bic")):
        for name in names:
            result = run(settings, model_name=name, out=str(tmp_path / names[0])).execute()
            assert without_places(result) == without_places(alone[name]), (names, name)
            assert taken(result) == (name == names[1])


@pytest.mark.slow
def test_methods_with_a_first_task_of_their_own_share_it_over_memories(settings, tmp_path):
    settings |= {"init_epoch": 2, "epochs": 1, "compression_epochs": 1, "max_tasks": 2, "checkpoint_seconds": 3600}
    for name in ("bic", "foster", "rmm-foster"):
        keys = {"model_name": name, "fixed_memory": True}  # RMM's default is a memory in total
        trained, shared = (run(settings, memory_per_class=memory, **keys).execute() for memory in (2, 4))
        keys |= {"cache_first_task": False, "out": str(tmp_path / "alone")}
        alone = run(settings, memory_per_class=4, **keys).execute()
        assert taken(trained) == (name == "rmm-foster"), "which takes FOSTER's"
        assert taken(shared), name
        assert without_places(shared) == without_places(alone), name
    assert len(entries(settings)) == 2
    assert {*PLAIN, *WITH_EXEMPLARS, "bic", "foster", "rmm-foster", "lwf", "fetril"} == {
        name for name, learner in registry.learners.items() if learner.Plan.plain_first_task
    }


def test_a_method_that_measures_its_quotas_in_training_mode_leaves_no_first_task_behind(settings, tmp_path):
    """RMM moves the statistics of batch norm after the training; what it took from another run, it moves, too."""
    settings |= {"init_epoch": 3, "epochs": 1, "max_tasks": 2, "checkpoint_seconds": 3600, "fixed_memory": True}
    first, icarl, again = (
        run(settings, model_name=name, prefix=prefix).execute()
        for name, prefix in (("rmm-icarl", "first"), ("icarl", "x"), ("rmm-icarl", "again"))
    )
    alone = run(settings, model_name="icarl", prefix="x", out=str(tmp_path / "alone")).execute()
    assert not taken(icarl) and taken(again)
    assert without_places(icarl) == without_places(alone)
    assert without_places(again) == without_places(first)


def test_the_page_names_the_methods_that_share_it():
    section = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8").split("## The first task is trained once")[1]
    same, _, others = section.partition("Their runs")
    assert set(re.findall("`([a-z_-]+)`", same)) == {*PLAIN, *WITH_EXEMPLARS}
    others = set(re.findall("`([a-z_-]+)`", others.partition("The other methods")[0]))
    assert others == {"bic", "foster", "rmm-foster", "lwf", "fetril"}


def test_it_counts_as_trained_and_the_seconds_spent_stand_beside(settings):
    settings |= {"max_tasks": 2, "epochs": 1}
    trained, taken = run(settings, model_name="replay").execute(), run(settings, model_name="icarl").execute()
    assert (
        trained["train_seconds_spent"] == trained["train_seconds"]
        and taken["train_seconds_spent"] < taken["train_seconds"]
    )
    log = (run_folder(resolve(settings | {"model_name": "icarl"})) / "log.txt").read_text()
    saved = float(log.split(" s saved")[0].split()[-1])
    assert taken["train_seconds"] - taken["train_seconds_spent"] == pytest.approx(saved, abs=0.06)
    assert taken["images_trained"] == trained["images_trained"] and taken["total_seconds"] > taken["train_seconds"]


@pytest.mark.parametrize(
    "key, value",
    [
        ("seed", 1),
        ("init_epoch", 2),
        ("init_lr", 0.05),
        ("init_milestones", [1]),
        ("init_weight_decay", 0.0),
        ("convnet_type", "resnet20"),
        ("batch_size", 16),
        ("init_cls", 3),
        ("shuffle", False),
        ("flip", False),
        ("images_per_class", 2),
        ("scheduler", "cosine"),
        ("momentum", 0.8),
        ("precision", "fp32"),
        ("optimizer", "adamw"),
    ],
)
def test_what_decides_the_first_task_decides_the_entry(key, value, settings):
    keys = {"model_name": "replay", "precision": "bf16", "convnet_type": "resnet8"}
    keys |= {"init_lr": 0.1, "init_weight_decay": 0.001}  # of which each optimiser has its own defaults
    usual, other = run(settings, **keys), run(settings, **keys | {key: value})
    assert usual.first_task_file() != other.first_task_file()


@pytest.mark.parametrize(
    "key, value",
    [
        ("memory_per_class", 3),
        ("exemplars", "random"),
        ("epochs", 5),
        ("lrate", 0.05),
        ("wsc.retain", 0.5),
        ("T", 3.0),
        ("increment", 4),
        ("num_workers", 1),
        ("device", "auto"),
        ("threads", 1),
        ("save_weights", True),
    ],
)
def test_what_decides_later_tasks_alone_leaves_it_shared(key, value, settings):
    usual = run(settings, model_name="wa", consolidate=True)
    other = run(settings, **{"model_name": "wa", "consolidate": True} | {key: value})
    assert usual.config.to_dict() != other.config.to_dict()
    assert usual.first_task_file() == other.first_task_file()


def test_a_new_option_of_a_learner_is_not_forgotten(settings, monkeypatch):
    """A declaration is enough: runs with different values share neither folder nor first task."""

    @dataclass(frozen=True)
    class Options:
        mixing: str = key("none", "a key of this test")

    monkeypatch.setattr(registry.learners["replay"], "Options", Options)
    none, cutmix = (run(settings, model_name="replay", mixing=name) for name in ("none", "cutmix"))
    assert none.first_task_file() != cutmix.first_task_file()
    assert none.folder != cutmix.folder


def test_a_new_key_of_all_learners_is_not_forgotten(settings, tmp_path):
    """The package with one more line: a key beside ``momentum``."""
    shutil.copytree(ROOT / "pycil_wsc", tmp_path / "pycil_wsc", ignore=shutil.ignore_patterns("__pycache__"))
    options = tmp_path / "pycil_wsc" / "training" / "learner_config.py"
    line = "    momentum: float ="
    assert options.read_text().count(line) == 1
    options.write_text(options.read_text().replace(line, f'    mixing: str = key("none", "new")\n{line}'))
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.keys import key
from pycil_wsc.runs import first_task
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run
first_task.CODE = "the same"
for mixing in "none", "none", "cutmix":
    config = resolve({settings | {"model_name": "replay", "convnet_type": "resnet8"}!r} | {{"mixing": mixing}})
    dataset = Datasets().of(config)
    print(run_folder(config), Run(config, dataset).first_task_file().name)
"""
    told = fresh.printed(script, tmp_path / "script.py", cwd=tmp_path)
    first, again, other = (line.split() for line in told.splitlines())
    assert first == again and first[0] != other[0] and first[1] != other[1]


def test_other_images_or_other_code_are_another_first_task(settings, tmp_path, monkeypatch):
    one = run(settings, model_name="replay")
    before = one.first_task_file()
    with np.load(settings["dataset"].removeprefix("npz:")) as arrays:
        changed = dict(arrays)
    changed["train_x"][0, 0, 0, 0] ^= 1
    np.savez(tmp_path / "changed.npz", **changed)
    other = run(settings, model_name="replay", dataset=f"npz:{tmp_path / 'changed.npz'}")
    assert other.first_task_file() != before
    monkeypatch.setattr(first_task, "CODE", "other")
    assert one.first_task_file() != before


def test_a_backbone_of_another_package_decides_by_its_code(settings, tmp_path, monkeypatch):
    source = tmp_path / "my_backbones.py"
    source.write_text(
        "from pycil_wsc.networks.nets import make_backbone\ndef build(): return make_backbone('resnet8')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.backbones, "mine", importlib.import_module("my_backbones").build)
    mine, ours = run(settings, convnet_type="mine"), run(settings)
    keys = [mine.first_task_file(), ours.first_task_file()]
    source.write_text(source.read_text() + "# edited\n")
    assert mine.first_task_file() not in keys and ours.first_task_file() == keys[1]


def test_consolidating_the_first_task_is_not_shared(settings):
    run(settings, **{"wsc.first_task": True}).execute()
    assert not entries(settings)


def a_bit_flipped(content):
    """In the middle of the tensors."""
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]


@pytest.mark.parametrize("harm", [lambda content: b"half of it", a_bit_flipped])
def test_a_damaged_entry_is_trained_again(harm, settings):
    settings |= {"max_tasks": 2, "epochs": 1}
    undisturbed = run(settings, model_name="replay").execute()
    (entry,) = entries(settings)
    entry.write_bytes(harm(entry.read_bytes()))
    again = run(settings, model_name="replay", prefix="again").execute()
    assert again["curve"] == undisturbed["curve"] and again["train_seconds_spent"] == again["train_seconds"]
    third = run(settings, model_name="replay", prefix="third").execute()
    assert third["train_seconds_spent"] < third["train_seconds"], "taken from what was trained again"


@pytest.mark.parametrize("obstacle", ["no lock", "full disk", "folder"])
def test_one_that_cannot_be_kept_is_trained_by_each_run(obstacle, settings, monkeypatch, caplog):
    settings |= {"max_tasks": 2, "epochs": 1}
    refused = Mock(side_effect=Unwritable("first_tasks: cannot be written (No space left on device)"))
    if obstacle == "folder":
        path = run(settings, model_name="replay").first_task_file()
        path.mkdir(parents=True)
    else:
        monkeypatch.setattr(first_task, "save_state", refused)
    if obstacle == "no lock":
        monkeypatch.setattr(files, "locked", refused)
    found = [run(settings, model_name="replay", prefix=prefix).execute() for prefix in ("one", "two")]
    assert found[0]["curve"] == found[1]["curve"] and not any(map(taken, found))
    assert "cannot be written" in caplog.text and "; other runs train the first task again" in caplog.text


@pytest.mark.slow
def test_two_processes_that_want_it_at_once_train_it_once(settings, tmp_path, unreported):
    settings |= {"model_name": ["replay", "wsc"], "init_epoch": 20, "max_tasks": 2}
    processes = [command(tmp_path, settings), command(tmp_path, settings)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    taken = [
        path for path in Path(settings["out"]).rglob("log.txt") if "taken from a run that shares it" in path.read_text()
    ]
    found = results(settings).values()
    assert len(taken) == 1 and len({json.dumps(result["matrix"][0]) for result in found}) == 1 and len(found) == 2


def test_a_first_task_that_was_stopped_and_resumed_is_shared_too(settings):
    settings |= {"max_tasks": 2, "epochs": 1}
    with killed_at(2):
        run(settings, model_name="replay").execute()
    assert not entries(settings)
    resumed, other = (run(settings, model_name=name).execute() for name in ("replay", "icarl"))
    assert not taken(resumed) and taken(other) and len(entries(settings)) == 1
    alone = run(settings | {"cache_first_task": False}, model_name="icarl", prefix="alone").execute()
    assert without_places(other) == without_places(alone)


def test_a_first_task_that_was_stopped_and_resumed_with_another_package_is_not_shared(settings, monkeypatch):
    """Neither of the two has trained it, however often it is stopped."""
    settings |= {"init_epoch": 3}
    with killed_at(1):
        run(settings, model_name="replay", max_tasks=1).execute()
    monkeypatch.setattr("pycil_wsc.runs.first_task.importlib.metadata.version", lambda *_: "another")
    with killed_at(1):
        run(settings, model_name="replay", max_tasks=1).execute()
    run(settings, model_name="replay", max_tasks=1).execute()
    assert not entries(settings)


@pytest.mark.parametrize(
    "changed", ["pycil_wsc.runs.first_task.device_name", "pycil_wsc.runs.first_task.importlib.metadata.version"]
)
def test_another_processor_or_package_shares_none(changed, settings, monkeypatch):
    usual = run(settings)
    before = usual.first_task_file()
    assert usual.first_task_file() == before
    monkeypatch.setattr(changed, lambda *_: "another")
    assert usual.first_task_file() != before
