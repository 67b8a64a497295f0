"""Runs with `"tasks": [...]`, and a longer list that extends a finished run."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from support.months import MONTHS, listed, month, photos, weights
from support.small_runs import (
    command,
    killed_at,
    results,
    wait_until,
    waiting_at,
    without_measurements,
    write,
)

import pycil_wsc
from main import main
from pycil_wsc import report
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.training import loop

pytestmark = pytest.mark.usefixtures("unreported")


@pytest.fixture
def months(tmp_path):
    return [month(tmp_path / f"{number}.npz", names, number) for number, names in enumerate(MONTHS)]


def run(tmp_path, tasks, **keys):
    """The folder and the result of the run of these tasks."""
    settings = listed(tmp_path, tasks, **keys)
    tmp_path.mkdir(exist_ok=True)
    assert main(["--config", write(tmp_path, settings)]) == 0
    ((folder, result),) = results(settings).items()
    return folder, result


@pytest.mark.slow
def test_every_task_counts_its_own_test_images_and_classes_by_name(months, tmp_path, undrawn):
    folder, result = run(tmp_path, months, save_weights=True)
    assert result["class_names"] == ["cat", "ant", "bee", "dog"] and folder.parts[-4].endswith("0.npz-tasks")
    assert [len(row) for row in result["matrix"]] == [1, 2, 3]
    assert np.allclose(result["curve"], [np.mean(row) for row in result["matrix"]])  # as many test images each
    assert np.array(result["confusion"]).sum(1).tolist() == [20, 20, 10, 10] and result["avg_acc"] > 70
    assert json.loads((folder / "config.json").read_text())["tasks"] == months
    assert result["data"]["train"] == 60 and len(result["data"]["tasks"]) == 3
    assert "0, 3 tasks, tiny" in report.write_report(tmp_path / "runs").read_text()


@pytest.mark.parametrize("name", ["bic", "coil", "wa"])
def test_a_method_that_needs_new_classes_says_so_before_training(name, months, tmp_path, capsys):
    settings = listed(tmp_path, [months[0], month(tmp_path / "3.npz", ["cat"], 3)], model_name=name)
    assert main(["--config", write(tmp_path, settings)]) == 2
    assert f"'{name}' cannot learn task 2, which brings no new class" in capsys.readouterr().err


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one if isinstance(one[name], torch.Tensor)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wsc", "foster"])
def test_one_more_task_goes_on_from_the_finished_ones(name, months, tmp_path, monkeypatch, capsys):
    """The numbers equal those of a run with the whole list from the start, and only new tasks are trained."""
    keys = {"model_name": name, "epochs": 2, "batch_size": 16}
    whole_folder, whole = run(tmp_path / "whole", months, **keys)
    folder, first = run(tmp_path, months[:2], **keys)
    config = write(tmp_path, listed(tmp_path, months, **keys))
    capsys.readouterr()
    assert main(["--config", config, "--status"]) == 0
    assert "waiting" in (status := capsys.readouterr().out) and "has tasks to go" in status
    learned, train = [], loop.train
    monkeypatch.setattr(
        loop, "train", lambda learner, task, *rest: (learned.append(task.index), train(learner, task, *rest))
    )
    again, result = run(tmp_path, months, **keys)
    assert again == folder and learned == [2] and result["curve"][:2] == first["curve"]
    strip = [without_measurements(each) for each in (result, whole)]
    assert strip[0] == strip[1] and same(weights(folder), weights(whole_folder))
    capsys.readouterr()
    assert main(["--config", config]) == 0 and learned == [2], "finished: nothing is trained again"
    assert main(["--config", config, "--status"]) == 0 and "done 1/1" in capsys.readouterr().out


def test_a_dry_run_refuses_the_result_that_the_run_would_refuse(months, tmp_path, capsys):
    run(tmp_path, months)
    config = write(tmp_path, listed(tmp_path, months[:2]))
    capsys.readouterr()
    assert main(["--config", config, "--dry-run", "--set", "seed=[1993, 1994]"]) == 1
    _, first, second, total = capsys.readouterr().out.splitlines()
    assert "will fail: " in first and "was made with other settings" in first
    assert "images" in second and "will fail" not in second and total.startswith("2 runs, ")


def test_the_weights_that_are_loaded_are_the_last_ones_saved(months, tmp_path):
    folder, _ = run(tmp_path, months[:2], save_weights=True)
    assert pycil_wsc.load(folder).learner.manager.boundaries == [0, 2, 3]
    run(tmp_path, months, save_weights="every")
    assert pycil_wsc.load(folder).learner.manager.boundaries == [0, 2, 3, 4]


@pytest.mark.slow
def test_kill_9_within_a_later_task_costs_nothing(months, tmp_path):
    _, whole = run(tmp_path / "whole", months, epochs=8, batch_size=16)
    settings = listed(tmp_path, months, epochs=8, batch_size=16)
    with waiting_at(9):  # in the second task
        process = command(tmp_path, settings)
    folder = lambda: next((tmp_path / "runs").rglob("log.txt"), None)  # noqa: E731
    wait_until(lambda: folder() and "task 2/3 train epoch 3/" in folder().read_text(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not results(settings)
    _, result = run(tmp_path, months, epochs=8, batch_size=16)
    assert without_measurements(result) == without_measurements(whole)
    assert folder().read_text().count("task 1/3 train epoch 3/3") == 1, "the first task is not learned again"


@pytest.mark.slow
def test_a_run_stopped_at_each_checkpoint_of_an_added_task_ends_like_one_never_stopped(months, tmp_path):
    _, whole = run(tmp_path / "whole", months)
    run(tmp_path, months[:2])
    for last in (1, 2):
        with killed_at(last):
            run(tmp_path, months)
    _, result = run(tmp_path, months)
    assert without_measurements(result) == without_measurements(whole)


def test_other_tasks_than_those_learned_are_refused(months, tmp_path, capsys):
    run(tmp_path, months[:2])
    other = listed(tmp_path, [months[0], months[2]])
    assert main(["--config", write(tmp_path, other)]) == 1
    assert "was made with other settings" in capsys.readouterr().err
    month(tmp_path / "1.npz", MONTHS[1], seed=9)
    assert main(["--config", write(tmp_path, listed(tmp_path, months))]) == 1
    assert "was made with other data" in capsys.readouterr().err


def test_two_lists_with_one_beginning_in_one_sweep_are_told_apart(months, tmp_path, capsys):
    settings = listed(tmp_path, [months, months[:2]])
    assert main(["--config", write(tmp_path, settings), "--dry-run"]) == 2
    assert "two runs would share" in capsys.readouterr().err


def test_a_dry_run_plans_the_images_of_all_tasks(months, tmp_path, capsys):
    settings = listed(tmp_path, months)
    assert main(["--config", write(tmp_path, settings), "--dry-run"]) == 0
    planned = capsys.readouterr().out
    _, result = run(tmp_path, months)
    assert f"{result['images_trained']:,} images" in planned
    capsys.readouterr()
    assert main(["--config", write(tmp_path, settings), "--dry-run"]) == 0 and "(finished)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset": "digits"},
        {"init_cls": 2},
        {"increment": 3},
        {"classes": ["cat"]},
        {"classes": [0]},
        {"shuffle": False},
    ],
)
def test_keys_of_a_split_data_set_are_refused_beside_tasks(keys, months, tmp_path, capsys):
    assert main(["--config", write(tmp_path, listed(tmp_path, months) | keys)]) == 2
    assert f"{next(iter(keys))}: cannot be combined with 'tasks'" in capsys.readouterr().err


def test_the_recorded_configuration_of_such_a_run_is_a_configuration(months, tmp_path):
    config = resolve(listed(tmp_path, months))
    assert load(write(tmp_path, config.to_dict())) == [config]


def test_folders_of_classes_are_tested_on_a_part_that_is_held_out(tmp_path, capsys):
    tasks = [photos(tmp_path / "january", ["cat", "ant"], 1), photos(tmp_path / "february", ["cat", "bee"], 2)]
    keys = {"image_size": 16, "num_workers": 0, "epochs": 1, "init_epoch": 1}
    assert main(["--config", write(tmp_path, listed(tmp_path, tasks, **keys))]) == 2
    assert "january: no test images; arrange the images as" in capsys.readouterr().err
    for folder in ("january/dog", "february/ant"):  # without images, so that the task has no such class
        (tmp_path / folder).mkdir()
    _, result = run(tmp_path, tasks, **keys, validation_split=0.25)
    assert result["class_names"] == ["ant", "cat", "bee"] and result["tested_on"] == "validation"
    assert np.array(result["confusion"]).sum(1).tolist() == [1, 2, 1]


def test_folders_may_have_their_own_test_part(tmp_path):
    for number, (name, classes) in enumerate({"january": ["cat", "ant"], "february": ["cat", "bee"]}.items()):
        photos(tmp_path / name / "train", classes, number)
        photos(tmp_path / name / "val", classes, 10 + number, count=2)
    tasks = [f"folder:{tmp_path / name}" for name in ("january", "february")]
    _, result = run(tmp_path, tasks, image_size=16, num_workers=0, epochs=1, init_epoch=1)
    assert np.array(result["confusion"]).sum(1).tolist() == [2, 4, 2]


def test_an_image_file_takes_the_mean_size_of_the_first_tasks_files_in_a_memory_of_bytes(tmp_path):
    """Another task, with larger files, leaves the size of the memory as it is, and the whole list gives the same."""
    for number, (name, classes) in enumerate({"january": ["cat", "ant"], "february": ["cat", "bee"]}.items()):
        photos(tmp_path / name / "train", classes, number)
        photos(tmp_path / name / "val", classes, 10 + number, count=2)
    tasks = [f"folder:{tmp_path / name}" for name in ("january", "february")]
    for path in (tmp_path / "february" / "train").rglob("*.png"):
        path.write_bytes(path.read_bytes() + bytes(1000))
    sizes = [path.stat().st_size for path in (tmp_path / "january" / "train").rglob("*.png")]
    keys = {"image_size": 16, "num_workers": 0, "epochs": 1, "init_epoch": 1}
    keys |= {"memory_bytes": int(6.5 * np.mean(sizes))}
    run(tmp_path, tasks[:1], **keys)
    folder, added = run(tmp_path, tasks, **keys)
    kept = [json.loads(line)["exemplars"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(set(sizes)) > 1 and kept == [6, 6]
    _, whole = run(tmp_path / "whole", tasks, **keys)
    assert (added["matrix"], added["train_loss"]) == (whole["matrix"], whole["train_loss"])
