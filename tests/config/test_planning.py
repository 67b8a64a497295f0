"""What could not be trained is refused before anything is trained."""

from pathlib import Path

import pytest
import torch
from support.small_runs import results, write
from torch import nn

from main import main
from pycil_wsc import registry
from pycil_wsc.config.config_checks import remarks
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.tasks.tasks import TaskSequence, tasks_of
from pycil_wsc.output import watched
from pycil_wsc.runs.planning import check_backbone, too_slow
from pycil_wsc.runs.run import Run

pytestmark = pytest.mark.usefixtures("unreported")


class Whole(nn.Module):
    """A backbone without a split."""

    def __init__(self):
        super().__init__()
        self.out_dim, self.layers = 3, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.layers(images)


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--workers", "2"]])
@pytest.mark.parametrize(
    "keys, line",
    [
        ({"freeze": [["stem"], ["stage4"]]}, "freeze: the backbone has no part 'stage4'"),
        (
            {"convnet_type": "resnet18", "runs": [{}, {"convnet_options.stem": "foo"}]},
            "convnet_options of 'resnet18': ",
        ),
        (
            {"runs": [{}, {"fixed_memory": False, "memory_size": 3}]},
            "memory_size: the memory holds 3 exemplars, fewer than one for each of the 4 classes before task 3; ",
        ),
    ],
)
def test_a_wrong_run_at_the_end_of_a_sweep_stops_it_at_the_start(keys, line, options, settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings | keys), *options]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {line}") and errors.count("\n") == 1
    assert not results(settings) and not list(Path(settings["out"]).rglob("metrics.jsonl"))


def test_a_backbone_that_memo_cannot_split_stops_a_sweep_at_the_start(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.backbones, "whole", Whole)
    keys = {"convnet_type": "whole", "model_name": ["replay", "memo"]}
    assert main(["--config", write(tmp_path, settings | keys)]) == 2
    assert "which MEMO needs" in capsys.readouterr().err and not results(settings)


def test_a_finished_run_is_skipped_even_where_its_backbone_can_no_longer_be_built(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.backbones, "whole", Whole)
    keys = {"convnet_type": "whole", "model_name": "finetune", "init_epoch": 1, "epochs": 1}
    path = write(tmp_path, settings | keys)
    assert main(["--config", path]) == 0

    def broken():
        raise ValueError("no longer")

    monkeypatch.setitem(registry.backbones, "whole", broken)
    monkeypatch.setattr("pycil_wsc.runs.planning._buildable", set())
    assert main(["--config", path]) == 0 and main(["--config", path, "--dry-run"]) == 0


def test_planning_changes_nothing_of_what_is_random(settings):
    config = resolve(settings | {"convnet_options.width": 5})
    before = torch.get_rng_state()
    check_backbone(config, load_dataset(config.dataset, ".").info.image_size)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_of_weights_that_is_not_there_is_named_before_another_run_trains(settings, tmp_path, capsys):
    pytest.importorskip("timm")
    keys = {"convnet_type": "timm:resnet18", "pretrained": [False, str(tmp_path / "no.pth")], "image_size": 32}
    assert main(["--config", write(tmp_path, settings | keys)]) == 2
    assert "pretrained: " in capsys.readouterr().err
    assert not results(settings) and not list(Path(settings["out"]).rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"model_name": "ema", "decay": 0.99}, "decay: takes about 100 optimiser steps to take effect, but no task"),
        ({"model_name": "ema", "decay": 0.5}, None),
        (
            {"model_name": "cls_er"},
            "plastic_decay, stable_decay: take up to about 1,429 optimiser steps to take effect, but no task has",
        ),
        ({"model_name": "redo", "recycle_every": 7}, "recycle_every: takes about 7 optimiser steps"),
        ({"model_name": "redo", "recycle_every": 6}, None),
        ({"model_name": "wsc", "wsc.reset": "continual_backprop"}, "wsc.replacement_rate: takes about "),
        (
            {"model_name": "wsc", "wsc.reset": "continual_backprop", "wsc.replacement_rate": 0.5},
            "wsc.maturity: takes about 1,000 optimiser steps",
        ),
        ({"model_name": "wsc", "wsc.reset": "continual_backprop", "wsc.replacement_rate": 0.0}, None),
        ({"model_name": "wsc"}, None),
    ],
)
def test_a_method_that_needs_more_steps_than_a_task_has_says_so_in_a_line(keys, line, settings):
    """Of tasks of six steps: two epochs of three batches."""
    config = resolve(settings | {"batch_size": 8, "init_epoch": 2, "epochs": 2, "memory_per_class": 1} | keys)
    run = Run(config, load_dataset(config.dataset, "."), lambda progress: None)
    lines = too_slow(run.learner, [2 * 24, 2 * 24, 2 * 24])
    assert len(lines) == bool(line) and (line is None or lines[0].startswith(line))


def test_tasks_that_are_long_enough_are_not_counted(settings):
    keys = {"model_name": "redo", "recycle_every": 7, "batch_size": 8, "init_epoch": 3, "epochs": 2}
    config = resolve(settings | keys)
    run = Run(config, load_dataset(config.dataset, "."), lambda progress: None)
    (line,) = too_slow(run.learner, [3 * 24, 2 * 24, 2 * 24])
    assert "but 2 of 3 tasks have fewer (about 6)" in line
    (line,) = too_slow(run.learner, [3 * 24, 2 * 24, 2 * 24], first=1)
    assert "but no task has as many" in line


def test_what_a_method_needs_in_steps_is_said_before_it_trains(settings, tmp_path, capsys):
    keys = {"model_name": "redo", "init_epoch": 1, "epochs": 1, "max_tasks": 1}
    assert main(["--config", write(tmp_path, settings | keys)]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = next(number for number, line in enumerate(lines) if "recycle_every: takes about 1,000" in line)
    trained = next(number for number, line in enumerate(lines) if "CNN" in line)
    assert said < trained


@pytest.mark.parametrize(
    "keys, tasks, memory, remarks",
    [
        ({"memory_per_class": 4}, "b2-inc2: 3 tasks: 2, 2, 2 classes", [0, 24], []),
        (
            {"init_cls": 1, "increment": 2, "memory_per_class": 100_000},
            "b1-inc2: 4 tasks: 1, 2, 2, 1 classes",
            [0, 72],
            [
                "2 runs: increment: the last task has 1 class, not 2 (4 tasks: 1, 2, 2, 1 classes)",
                "1 run: memory_per_class: 100000 is more than any class has images (at most 12); all images are kept",
            ],
        ),
        (
            {"init_cls": 10, "increment": 10, "increments": [3, 1, 2], "memory_per_class": 4},
            "3tasks: 3 tasks: 3, 1, 2 classes",
            [0, 24],
            [],
        ),
        (
            {"fixed_memory": False, "memory_size": 100_000},
            "b2-inc2: 3 tasks: 2, 2, 2 classes",
            [0, 72],
            ["1 run: memory_size: 100000 is more than the 72 training images; all are kept"],
        ),
    ],
)
def test_a_dry_run_shows_the_tasks_the_memory_and_what_may_surprise(
    keys, tasks, memory, remarks, settings, tmp_path, capsys
):
    settings |= {"model_name": ["finetune", "replay"]} | keys
    assert main(["--config", write(tmp_path, settings), "--dry-run"]) == 0
    outline, *lines = capsys.readouterr().out.splitlines()
    assert outline.endswith(tasks)
    assert [line for line in lines if ": " in line and "memory_per_class: has no effect" not in line] == remarks
    kept = [int(line.rpartition(", ")[2].split()[0].replace(",", "")) for line in lines if line.endswith(" in memory")]
    assert kept == [number for number in memory if number]  # finetune keeps none


def test_many_tasks_are_not_all_listed():
    dataset = load_dataset("digits", ".")
    labels = dataset.train.targets
    tasks = TaskSequence(list(range(100)), range(101), labels, labels, labels, labels)
    assert tasks.in_words() == f"100 tasks: {'1, ' * 18}..., 1 classes"


def test_planning_that_takes_long_says_how_far_it_is(monkeypatch, capsys):
    """The first run, which reads the data, takes 100 s, and each other one a second."""
    clock = iter([0, 100, 100, *range(100, 300)])
    monkeypatch.setattr("pycil_wsc.output.time.monotonic", lambda: next(clock))
    assert list(watched(range(50), 50, "planning")) == list(range(50))
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "planning: 4 of 50 runs, about 0:00:46 left"
    assert len(_) < 5 and second.startswith("planning: ")


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_nothing_surprises_in_a_run_with_a_methods_own_defaults(name, digits):
    config = resolve({"model_name": name, "dataset": "digits", "init_cls": 4, "increment": 3})
    assert remarks(config, tasks_of(digits, config)) == []
