"""Scalars for TensorBoard: the run's own numbers, each epoch and each task once, even where a run was stopped."""

import json
import sys
import types

import numpy as np
import pytest
from support.small_runs import killed_at, small_data

from main import main
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import TrainingDiverged
from pycil_wsc.runs.run import Run

SETTINGS = {
    "model_name": "replay",
    "memory_per_class": 2,
    "init_cls": 4,
    "increment": 3,
    "convnet_type": "tiny",
    "device": "cpu",
    "init_epoch": 3,
    "epochs": 2,
    "batch_size": 256,
    "init_milestones": [1, 2],
    "milestones": [1],
    "threads": 1,
    "checkpoint_seconds": 0,
}


@pytest.fixture
def run(tmp_path):
    """keys -> a run over three tasks of three, two and two epochs."""
    data = f"npz:{small_data(tmp_path / 'data.npz', classes=10, per_class=4)}"
    dataset, places = load_dataset(data, "."), {"dataset": data, "out": str(tmp_path / "runs"), "tensorboard": True}
    return lambda **keys: Run(resolve(SETTINGS | places | keys), dataset)


class StandIn:
    """A writer that stores scalars by file; a new one drops the steps from ``purge_step`` on,
    as TensorBoard does.
    """

    scalars = {}

    def __init__(self, folder, purge_step):
        self.flushed = True
        self.values = StandIn.scalars.setdefault(folder.split("tensorboard/")[1], {})
        for points in self.values.values():
            points[:] = [(step, value) for step, value in points if step < purge_step]

    def add_scalar(self, name, value, step):
        self.values.setdefault(name, []).append((step, value))
        self.flushed = False

    def flush(self):
        self.flushed = True

    def close(self):
        assert self.flushed


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(StandIn, "scalars", {})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=StandIn))
    return StandIn.scalars


def check(scalars, result, nme):
    """``scalars``: {file: {name: [(step, value)]}}, against the result,
    the schedule by hand and the definition of forgetting.
    """
    epochs, tasks = scalars["epochs"], scalars["tasks"]
    expected = {"train/loss": sum(result["train_loss"], []), "train/accuracy": sum(result["train_accuracy"], [])}
    expected["train/learning_rate"] = [0.1, 0.01, 0.001, 0.1, 0.01, 0.1, 0.01]
    matrix = result["matrix"]
    forgetting = [0.0, matrix[0][0] - matrix[1][0], result["forgetting"]]
    expected |= {
        "test/cnn_top1": result["curve"],
        "test/newest_task": [row[-1] for row in matrix],
        "test/forgetting": np.maximum(forgetting, 0),
    }
    expected |= {"test/nme_top1": result["nme_curve"]} if nme else {}
    assert {*epochs, *tasks} == {*expected, "train/images_per_second"}
    assert [step for step, _ in epochs["train/images_per_second"]] == list(range(7)) and min(
        epochs["train/images_per_second"]
    )[1] > 0
    for name, values in expected.items():
        assert (epochs | tasks)[name] == [
            (step, pytest.approx(value, rel=1e-6, abs=1e-6)) for step, value in enumerate(values)
        ], name


@pytest.mark.parametrize("nme", [True, False])
def test_the_numbers_are_the_results(nme, run, stand_in):
    check(stand_in, run(nme=nme).execute(), nme)


def test_the_learning_rate_is_that_of_the_schedule_whatever_the_factor_of_the_backbone(run, stand_in):
    check(stand_in, run(backbone_lr_factor=0.1).execute(), True)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 3, 4, 5, 10])
def test_a_stop_doubles_no_step_and_leaves_none_out(number, before, run, stand_in):
    """Around the checkpoint of the first epoch, of the first task's last, of its end, of the next epoch,
    and of the last task's end.
    """
    with killed_at(number, saved=not before):
        run().execute()
    check(stand_in, run().execute(), True)


def test_the_event_files_read_back(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with killed_at(5, saved=False):
        run().execute()
    ended = run()
    result, scalars = ended.execute(), {}
    for part in ("epochs", "tasks"):
        events = accumulator.EventAccumulator(str(ended.folder / "tensorboard" / part)).Reload()
        scalars[part] = {
            name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]
        }
    check(scalars, result, True)


@pytest.mark.parametrize("only", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("key, package", [("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases")])
def test_without_the_package_one_line_says_so_before_training(key, package, only, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, key, None)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"out": str(tmp_path / "runs")}))
    assert main(["--config", str(tmp_path / "config.json"), f"--{key}", *only]) == 2
    captured = capsys.readouterr()
    expected = f"error: {key}: {package} is not installed; pip install {key}, or set the key to false"
    assert captured.err.strip() == expected
    assert "task" not in captured.out


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


class OfflineRun:
    """The rows logged to a run of Weights & Biases; a new run starts empty."""

    runs = []

    def __init__(self, **options):
        self.options, self.rows, self.finished = options, [], False
        OfflineRun.runs.append(self)

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    OfflineRun.runs = []
    module = types.ModuleType("wandb")
    module.init, module.Settings = OfflineRun, lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", module)
    return OfflineRun.runs


def test_weights_and_biases_has_tensorboards_scalars_offline(run, monkeypatch, wandb):
    StandIn.scalars = {}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=StandIn))
    run(wandb=True).execute()
    (told,) = wandb
    assert told.options["mode"] == "offline" and told.finished
    for axis, folder in (("epoch", "epochs"), ("task", "tasks")):
        points = {}
        for row in (row for row in told.rows if axis in row):
            for name in row.keys() - {axis}:
                points.setdefault(name, []).append((row[axis], row[name]))
        assert points == StandIn.scalars[folder]


def test_after_a_stop_weights_and_biases_has_every_epoch_and_task_once(run, wandb):
    with killed_at(5, saved=False):
        run(wandb=True, tensorboard=False).execute()
    run(wandb=True, tensorboard=False).execute()
    assert len(wandb) == 2
    assert [row["epoch"] for row in wandb[-1].rows if "epoch" in row] == list(range(7))
    assert [row["task"] for row in wandb[-1].rows if "task" in row] == [0, 1, 2]


def test_the_files_are_closed_when_a_run_fails(run, stand_in, monkeypatch):
    closed = []
    monkeypatch.setattr(StandIn, "close", lambda self: closed.append(self))
    with pytest.raises(TrainingDiverged):
        run(init_lr=1e30).execute()
    assert len(closed) == 2
