"""Whole runs through the command line: every learner learns, a killed run resumes,
and failures lose no completed work.
"""

import contextlib
import copy
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from support.small_runs import (
    PROTOTYPES,
    SETTINGS,
    Command,
    Killed,
    command,
    killed_at,
    results,
    run_of,
    small_data,
    stopped,
    suited,
    undrawn,
    wait_until,
    waiting_at,
    without_checkpoints,
    without_measurements,
    write,
)
from support.synthetic import lines_of
from torch import nn
from torch.nn.functional import cross_entropy

import pycil_wsc
from main import main
from pycil_wsc import files, registry, report, state
from pycil_wsc import reproducibility as environment
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.runs import journal
from pycil_wsc.runs.planning import planned_images
from pycil_wsc.runs.run import Run
from pycil_wsc.state import save_state
from pycil_wsc.training import loop

pytestmark = pytest.mark.usefixtures("unreported")


def test_a_list_as_an_option_of_the_backbone_is_the_same_run_in_every_file(settings, tmp_path, monkeypatch, undrawn):
    monkeypatch.setitem(registry.backbones, "wide", lambda widths=[16]: make_backbone("tiny", {"width": widths[0]}))  # noqa: B006
    keys = {"convnet_type": "wide", "convnet_options": {"widths": [[4, 8]]}, "validation_split": 0.25}
    assert main(["--config", write(tmp_path, settings | {"model_name": "replay"} | keys)]) == 0
    ((folder, result),) = results(settings).items()
    assert result["config"]["convnet_options.widths"] == [4, 8]
    (config,) = load(folder / "config.json")
    assert run_folder(config) == folder
    reported = Path(settings["out"], "run", "report")
    for path in (next((reported / "configs").iterdir()), reported / "tuned_replay.json"):
        (again,) = load(path)
        assert again.convnet_options == config.convnet_options, path


# methods whose penalties, projections, distillation, masked losses, averages, small memory or few new images hold the
# new classes back; after so few epochs these are no more than better than chance
HELD_BACK = {
    "cls_er",
    "coil",
    "derpp",
    "l2p",  # prompts alone, in a transformer of two random blocks
    "er_ace",
    "ewc",
    "fdr",
    "gdumb",
    "gem",
    "lucir",
    "lwf",
    "mas",
    "mer",
    "podnet",
    "rmm-foster",
    "rmm-icarl",
    "si",
    "xder",
}


def epochs_of(name):
    """The epochs of each of the three tasks, of the method's first phase; some methods train nothing in later tasks."""
    learner = registry.learners[name]
    # of methods that may leave the backbone as it is
    options = SimpleNamespace(adapt=True, tuning=None, probabilities="softmax")
    config = SimpleNamespace(init_epoch=3, options=options, **dict.fromkeys(learner.Plan.epoch_keys, 0))
    if learner.Plan.epoch_keys:
        setattr(config, learner.Plan.epoch_keys[0], 4)
    return [learner.Plan(config).planned_epochs(SimpleNamespace(index=task)) for task in range(3)]


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_learner_learns_three_tasks_and_writes_a_whole_result(name, undisturbed):
    folder, result = undisturbed(model_name=name, **stopped(name))
    assert [len(row) for row in result["matrix"]] == [1, 2, 3] and len(result["curve"]) == len(
        result["top5_curve"]
    ) == 3
    assert np.isclose(result["avg_acc"], np.mean(result["curve"])) and result["last_acc"] == result["curve"][-1]
    assert np.allclose(result["curve"], [np.mean(row) for row in result["matrix"]])  # the tasks are of equal size
    least = 100 / 6 if name in HELD_BACK else 50
    assert result["new_acc"] > least, "the newest of two easy tasks is learned"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["cnn_top1"] for line in lines] == result["curve"]
    beside = {"data_root": "data", "save_weights": "every", "tensorboard": False, "wandb": False, "analyse": []}
    config = json.loads((folder / "config.json").read_text())
    assert folder.is_relative_to(config.pop("out")) and config == result["config"] | beside
    epochs = re.findall(r"task 3/3 .*epoch \d+/\d+:", (folder / "log.txt").read_text())
    assert len(epochs) >= epochs_of(name)[2]
    per_class = 100 * np.diag(result["confusion"]) / np.sum(result["confusion"], 1)
    assert np.allclose(per_class.reshape(3, 2).mean(1), result["matrix"][-1])
    assert np.sum(result["confusion"], 1).tolist() == [12] * 6 and result["class_names"] == [
        str(label) for label in result["class_order"]
    ]


@pytest.mark.parametrize("most, kept", [(4, True), (3, False)])
def test_the_confusion_matrix_of_too_many_classes_is_left_out(most, kept, settings, monkeypatch):
    monkeypatch.setattr("pycil_wsc.results.metrics.MOST_CONFUSED", most)
    result = run_of(settings, model_name="ncm", max_tasks=2).execute()
    assert np.shape(result["curve"]) == (2,) and (result["confusion"] is not None) == kept


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_loss_and_training_accuracy_of_every_epoch_are_kept(name, undisturbed):
    """The values in the log, rounded; phases in order."""
    folder, result = undisturbed(model_name=name, **stopped(name))
    logged = re.findall(
        r"task (\d)/3 .* epoch \d+/\d+: loss (.+), train accuracy (.+)", (folder / "log.txt").read_text()
    )
    kept = zip(result["train_loss"], result["train_accuracy"])
    assert logged == [
        (str(task + 1), f"{loss:.4f}", f"{accuracy:.2f}")
        for task, curves in enumerate(kept)
        for loss, accuracy in zip(*curves, strict=True)
    ]
    assert len(logged) >= sum(epochs_of(name))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for key in ("train_loss", "train_accuracy"):
        assert [line[key] for line in lines] == result[key]


def test_nme_and_top5_are_written_out(settings):
    run = run_of(settings, model_name="replay", precision="fp32", epochs=1, init_epoch=1, memory_per_class=3)
    result = run.execute()
    learner, images, tests = run.learner.eval(), run.dataset.train.images, run.dataset.test.images
    targets, normalise = run.manager.test_targets, run.evaluator.source.normalise

    @torch.no_grad()
    def features(pixels):
        found = learner.network.extract(normalise(torch.from_numpy(pixels))).double().numpy()
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    means = np.stack([features(images[learner.memory.classes[c]]).mean(0) for c in range(6)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    nearest = np.linalg.norm(features(tests)[:, None] - means, axis=2).argmin(1)
    assert result["nme_curve"][-1] == pytest.approx(100 * (nearest == targets).mean())
    with torch.no_grad():
        worst = learner.predict(normalise(torch.from_numpy(tests))).argmin(1).numpy()  # not among five of six classes
    assert result["top5_curve"][-1] == pytest.approx(100 * (worst != targets).mean())
    assert result["curve"][-1] < result["top5_curve"][-1] < 100


def test_loss_and_accuracy_of_an_epoch_are_those_of_its_batches(settings, monkeypatch):
    seen, call = [], loop.Backward.__call__

    def watched(backward, batch, loss=None):
        with torch.no_grad():
            logits = copy.deepcopy(backward.learner.network).train()(batch.images)
        right = (logits.argmax(1) == batch.targets).sum().item()
        seen.append((cross_entropy(logits, batch.targets).item(), right, len(batch)))
        return call(backward, batch, loss)

    monkeypatch.setattr(loop.Backward, "__call__", watched)
    keys = {"model_name": "replay", "precision": "fp32", "max_tasks": 1, "init_epoch": 2, "batch_size": 10}
    result = run_of(settings, **keys).execute()
    losses, right, sizes = zip(*seen)
    assert sizes == (10, 10, 4) * 2
    assert result["train_loss"][0] == pytest.approx([np.mean(losses[:3]), np.mean(losses[3:])], rel=1e-4)
    assert result["train_accuracy"][0] == pytest.approx([100 * sum(right[:3]) / 24, 100 * sum(right[3:]) / 24])


def test_an_additional_network_is_tested_itself(settings, monkeypatch):
    class Constant(nn.Module):
        def forward(self, images):
            return torch.eye(6)[torch.ones(len(images), dtype=torch.int64)]

    monkeypatch.setattr(Replay, "also_tested", lambda learner: {"twin": Constant()})
    result = run_of(settings, model_name="replay", init_cls=6, init_epoch=2).execute()
    assert result["twin_curve"] == [pytest.approx(100 / 6)] != result["curve"]


def test_lists_of_numbers_are_a_line_each_in_a_json_file(tmp_path):
    value = {
        "confusion": [[10, 0], [1, 9]],
        "curve": [1.5, None, True],
        "empty": [],
        "text": ["a [1,\n 2]", "}"],
        "nested": [{"a": [1, 2]}],
    }
    files.write_json(tmp_path / "value.json", value)
    text = (tmp_path / "value.json").read_text()
    assert json.loads(text) == value
    assert [line.strip() for line in text.splitlines()][1:5] == ['"confusion": [', "[10, 0],", "[1, 9]", "],"]
    assert '"curve": [1.5, null, true],\n' in text and '"a": [1, 2]\n' in text


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_the_planned_cost_is_the_cost(name, undisturbed):
    folder, result = undisturbed(model_name=name, **stopped(name))
    config = resolve(result["config"])
    assert result["images_trained"] == planned_images(config, tasks_of(load_dataset(config.dataset, "."), config))
    if config.memory_update == "step":  # 3, 4 and 4 epochs of 24 images, in a reservoir of 2000
        assert exemplars_kept(folder) == AFTER_TASKS.get(name, [72, 168, 264])
    elif not name.startswith("rmm"):  # whose quotas are drawn
        assert exemplars_kept(folder) == ([8, 16, 24] if registry.learners[name].Plan.uses_memory else [0, 0, 0])


AFTER_TASKS = {"agem": [8, 16, 24], "fdr": [24, 48, 72], "xder": [24, 48, 72]}  # a batch of each task; its images once


def exemplars_kept(folder):
    """After each task."""
    return [json.loads(line)["exemplars"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_a_run_stopped_again_and_again_ends_like_one_never_stopped(name, settings, undisturbed):
    """Stopped in the first task, at its end, in the second one and in the last or between two phases; WSC also in its
    warm-up, and between averages. Methods that train in the first task alone also stop at the end of the second one.

    The first task has three epochs, the others four. What a stop loses, the checkpoint of the next stop lacks too, so
    the end shows it.
    """
    _, expected = undisturbed(model_name=name, **stopped(name))
    config = resolve(settings | {"model_name": name, **stopped(name)})
    dataset = Datasets().of(config)
    moments = (0, 1, 3, 4, 6, 9) if name == "wsc" else (0, 1, 3, 6, 9)
    stops = [stop for stop in moments if stop <= sum(epochs_of(name))]
    for number, epochs in enumerate(np.diff(stops)):
        with killed_at(lambda calls: sum(optimizer is not None for _, optimizer in calls) == epochs, earlier=False):
            Run(config, dataset).execute()
        torch.manual_seed(number)  # the global generator must not matter
    if not any(epochs_of(name)[1:]):  # no checkpoint has an optimiser after the first task
        with killed_at(lambda calls: calls[-1][0]["task"] == 2):
            Run(config, dataset).execute()
    run = Run(config, dataset)
    result = run.execute()
    assert not (run.folder / "checkpoint.pt").exists()
    identity = expected["identity"] | {"shared": expected["identity"]["shared"] | {"dataset": config.dataset}}
    expected = expected | {"config": expected["config"] | {"dataset": config.dataset}, "identity": identity}
    assert without_measurements(result) == without_measurements(expected)


@pytest.mark.parametrize("moment", ["metrics.jsonl", "checkpoint.pt", "result.json"])
def test_a_stop_between_two_files_leaves_nothing_out(moment, settings, monkeypatch):
    """Killed at the very end, right after ``moment`` was last written."""
    config = resolve(settings | {"model_name": "replay"})
    dataset = load_dataset(config.dataset, ".")
    write = journal.write_atomically

    def write_and_die(path, content):
        write(path, content)
        whole = moment == "result.json" or len(run.journal.history) == 3
        if Path(path).name == moment and whole:
            raise Killed

    run = Run(config, dataset)
    for module in (journal, files, state):
        monkeypatch.setattr(module, "write_atomically", write_and_die)
    with pytest.raises(Killed):
        run.execute()
    for module in (journal, files, state):
        monkeypatch.setattr(module, "write_atomically", write)
    result = Run(config, dataset).execute()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["cnn_top1"] for line in lines] == result["curve"] and len(lines) == 3


@pytest.mark.slow
def test_kill_9_costs_nothing_and_the_finished_is_skipped(settings, tmp_path, capsys):
    settings |= {"seed": [1, 2], "epochs": 6, "init_epoch": 6, "batch_size": 16}
    undisturbed, runs = settings | {"out": str(tmp_path / "undisturbed")}, Path(settings["out"])
    assert main(["--config", write(tmp_path, undisturbed)]) == 0
    with waiting_at(15):  # of 21 of the first run
        process = command(tmp_path, settings)
    wait_until(lambda: sum(path.read_text().count("epoch") for path in runs.rglob("log.txt")) >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert main(["--config", write(tmp_path, settings)]) == 0
    assert "resumes " in "".join(path.read_text() for path in runs.rglob("log.txt"))
    assert [*map(without_measurements, results(settings).values())] == [
        *map(without_measurements, results(undisturbed).values())
    ]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    assert main(["--config", write(tmp_path, settings)]) == 0
    assert "2 of 2 runs finished before" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
def test_two_processes_on_one_folder_do_every_run_once(settings, tmp_path):
    settings |= {"seed": [1, 2, 3]}
    processes = [command(tmp_path, settings), command(tmp_path, settings)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(results(settings)) == 3
    assert sum(output.count("task 3/3") for output, _ in outputs) == 3
    assert outputs[0][0].split("Average accuracy")[1] == outputs[1][0].split("Average accuracy")[1]


def test_a_loss_beyond_what_a_result_may_hold_is_divergence(settings, tmp_path, capsys, monkeypatch):
    """Such as a penalty that the learning rate overshoots, while all numbers are still finite."""
    loss = Replay.loss

    def penalised(learner, batch):
        value, logits = loss(learner, batch)
        return value + 1e20, logits

    monkeypatch.setattr(Replay, "loss", penalised)
    assert main(["--config", write(tmp_path, settings | {"model_name": "replay"})]) == 1
    assert re.search(r"FAILED: the loss became 1\.0\d*e\+20 in task 1/3, epoch 1; try a lower", capsys.readouterr().out)
    assert not results(settings)


def test_gradients_of_the_warmup_that_are_no_numbers_are_divergence_and_not_tried_again(settings, tmp_path, capsys):
    settings |= {"lrate": 1e38, "epochs": 1, "wsc.warmup": 0.5}
    assert main(["--config", write(tmp_path, settings)]) == 1
    captured = capsys.readouterr()
    assert re.search("FAILED: task 2/3: the gradients of '.*' were not finite in the warm-up", captured.out)
    assert "tried once more" not in captured.out and "traceback in log.txt" not in captured.out


@pytest.mark.parametrize(
    "name, backbone", [(name, "resnet18") for name in ("replay", "bic", "foster", "wsc")] + [("replay", "resnet8")]
)
def test_a_last_batch_of_one_image_is_joined_to_the_one_before(name, backbone, settings):
    """ResNet-18 leaves images of 8x8 one pixel, on which batch norm fails; ResNet-8 leaves more, of one image all the
    same. 24 images in batches of 23, and batch norm is recomputed too.
    """
    keys = {"model_name": name, "convnet_type": backbone, "init_epoch": 1, "epochs": 1, "batch_size": 23}
    keys |= {"convnet_options.width": 4} | ({"convnet_options.stem": "small"} if backbone == "resnet18" else {})
    config = resolve(settings | keys | {"max_tasks": 2, "memory_per_class": 11, "wsc.warmup": 0.5})
    run, seen = Run(config, load_dataset(config.dataset, ".")), []

    def count(module, inputs):
        if module.training:
            seen.append(len(inputs[0]))

    hooks = [torch.nn.modules.module.register_module_forward_pre_hook(count)]
    try:
        assert run.learner.batches.number(24) == 1 and run.learner.batches.number(47) == 2
        assert len(run.execute()["curve"]) == 2
    finally:
        hooks[0].remove()
    assert 24 in seen and 1 not in seen


@pytest.mark.parametrize(
    "name, size, precision",
    [
        ("resnet18", 16, "fp32"),  # the last stage's first convolution has stride 2 and sees one pixel
        ("resnet18", 32, "bf16"),
        ("resnet18_small", 8, "fp32"),
        ("resnet18_cifar", 8, "bf16"),
        ("resnet8", 8, "bf16"),
    ],
)
def test_bf16_gives_way_to_fp32_where_gradients_would_be_undefined(name, size, precision, settings, tmp_path, caplog):
    settings |= {"dataset": f"npz:{small_data(tmp_path / 'other.npz', size=size)}", "convnet_type": name}
    for model in ("wsc", "der"):
        run = Run(
            resolve(settings | {"precision": "bf16", "model_name": model}), load_dataset(settings["dataset"], ".")
        )
        before = torch.get_rng_state()
        assert run.learner.precision.name == precision and torch.equal(torch.get_rng_state(), before)
        assert run.learner.precision.autocast().__class__ is (
            torch.autocast if precision == "bf16" else contextlib.nullcontext
        )
    assert len(caplog.messages) == 2 * (precision == "fp32") and all("too small for" in m for m in caplog.messages)


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_its_precision_where_another_one_would_be_selected(settings, monkeypatch, caplog):
    """``auto`` is bf16 on one machine and fp32 on another; a run that is moved does not mix them."""
    settings |= {"convnet_type": "resnet8", "model_name": "replay"}
    native = "pycil_wsc.training.precision.computes_bf16_natively"
    monkeypatch.setattr(native, lambda device: True)
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 0, "epoch": 2}):
        run_of(settings).execute()
    monkeypatch.setattr(native, lambda device: False)
    assert run_of(settings).learner.precision.name == "fp32", "where it begins"
    moved = run_of(settings)
    result = moved.execute()
    assert result["precision"] == result["identity"]["shared"]["precision"] == "bf16"
    assert "resumes in bf16, as it began" in (moved.folder / "log.txt").read_text()
    whole = run_of(settings, precision="bf16").execute()
    assert result["train_loss"] == whole["train_loss"] and result["curve"] == whole["curve"]


def test_a_run_whose_precision_the_device_lacks_does_not_go_on(settings, monkeypatch):
    settings |= {"convnet_type": "resnet8", "model_name": "replay"}
    monkeypatch.setattr("pycil_wsc.training.precision.computes_bf16_natively", lambda device: True)
    with killed_at(2):
        run_of(settings).execute()
    monkeypatch.setattr("pycil_wsc.training.precision.computes_bf16_natively", lambda device: False)
    monkeypatch.setattr("pycil_wsc.runs.checkpoint.computes_bf16", lambda device: False)
    with pytest.raises(UnusableRun, match="the run began in bf16, which 'cpu' does not have; resume it elsewhere"):
        run_of(settings).execute()


SPOILT = ["replay", "bic", "foster", "beef", "memo", "podnet", "icarl", "ssre"]  # what is tested is what is trained,
SPOILT += ["cls_er", "ema", "wise_ft", "ties", "wsc"]  # or an average or a merger of it
LAST_STEPS = [({"lrate": 1e38, "init_cls": 4}, name) for name in SPOILT]
LAST_STEPS += [  # the others have no step in later tasks, or one of the head alone, which stays finite
    ({"init_lr": 1e38, "init_cls": 6}, name) for name in ("replay", "ema", "ties", "fetril", "ranpac", "aper_finetune")
]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("keys, name", LAST_STEPS)
def test_a_last_step_that_spoils_the_weights_is_no_result(keys, name, settings):
    """One step in the last task: its loss is from before the step."""
    keys |= {"stable_rate": 1.0}  # CLS-ER tests an average that may otherwise miss the step
    keys |= {"model_name": name, "batch_size": 10_000, "epochs": 1, "init_epoch": 1, "checkpoint_seconds": 3600}
    config = resolve(settings | keys)
    run = Run(config, load_dataset(config.dataset, "."))
    message = r"are no longer finite numbers after task|the loss became "
    with without_checkpoints(), pytest.raises(TrainingDiverged, match=message):
        run.execute()
    assert not (run.folder / "result.json").exists()


@pytest.mark.usefixtures("uncounted")
def test_weights_that_are_set_without_training_are_checked_too(settings, monkeypatch):
    """Prototypes of a later task, in which nothing is trained."""
    config = resolve(settings | {"model_name": "simplecil"})
    run = Run(config, load_dataset(config.dataset, "."))
    features = run.learner.outputs.features

    def spoilt(indices):
        return features(indices) * (np.nan if run.task else 1)

    monkeypatch.setattr(run.learner.outputs, "features", spoilt)
    error = "^the weights are no longer finite numbers after task 2"
    with without_checkpoints(), pytest.raises(TrainingDiverged, match=error):
        run.execute()


def test_a_stock_pycil_file_runs_where_there_is_no_gpu(settings, tmp_path):
    stock = settings | {
        "prefix": "reproduce",
        "fixed_memory": False,
        "memory_size": 12,
        "device": ["0", "1", "2", "3"],
        "seed": [1993],
        "model_name": "replay",
    }
    assert main(["--config", write(tmp_path, stock)]) == 0
    ((folder, _),) = results(settings).items()
    assert folder.parent.name == "total12"
    assert [json.loads(line)["exemplars"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        12,
        12,
        12,
    ]


@pytest.mark.parametrize("name", ["replay", "wsc", "bic"])
def test_memory_in_bytes_is_as_many_exemplars_as_fit(name, settings, tmp_path, capsys):
    settings |= {"model_name": name, "init_epoch": 1, "epochs": 1, "batch_size": 24}
    bytes_ = 8 * 8 * 3 * 13 - 1
    in_bytes, in_all = {"memory_bytes": bytes_}, {"fixed_memory": False, "memory_size": 12}
    assert main(["--config", write(tmp_path, settings | in_bytes), "--dry-run"]) == 0
    assert f"/bytes{bytes_}/seed1993" in (plan := capsys.readouterr().out)
    for keys in (in_bytes, in_all):
        assert main(["--config", write(tmp_path, settings | keys)]) == 0
    (ours, theirs) = (results(settings)[run_folder(resolve(settings | keys))] for keys in (in_bytes, in_all))
    assert ours["matrix"] == theirs["matrix"] and ours["train_loss"] == theirs["train_loss"]
    assert f"1 run, {ours['images_trained']:,} training images to go" in plan
    assert (ours["config"]["memory_size"], ours["config"]["memory_bytes"]) == (12, bytes_)
    capsys.readouterr()
    assert main(["--config", write(tmp_path, settings | in_bytes)]) == 0
    assert "1 of 1 runs finished before" in capsys.readouterr().out


def test_dry_run_lists_runs_and_writes_nothing(settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings | {"seed": [1, 2]}), "--dry-run"]) == 0
    output = capsys.readouterr().out
    # by hand: 3 epochs of 24 images, then 4 of 24 + 8 and 4 of 24 + 16
    assert output.count("360 images") == 2 and "2 runs, 720 training images" in output
    assert not Path(settings["out"]).exists()


def one_error_line(capsys, arguments):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


def test_bad_input_is_one_line_and_exit_code_2(settings, tmp_path, capsys):
    path = write(tmp_path, settings)
    assert "--set retain: expected key=value" in one_error_line(capsys, ["--config", path, "--set", "retain"])
    assert "did you mean 'wsc.retain'" in one_error_line(capsys, ["--config", path, "--set", "wsc.retian=1"])
    assert "absent.npz" in one_error_line(capsys, ["--config", path, "--set", f"dataset=npz:{tmp_path}/absent.npz"])
    assert "init_cls 7 is more than the 6 classes" in one_error_line(capsys, ["--config", path, "--set", "init_cls=7"])
    assert "'cuda:99' is not available" in one_error_line(capsys, ["--config", path, "--device", "cuda:99"])


def test_an_output_folder_that_cannot_be_is_named(settings, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file" in one_error_line(
        capsys, ["--config", write(tmp_path, settings), "--out", str(tmp_path / "file" / "runs")]
    )


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(settings, tmp_path):
    """A limit on the size of files stands in for the disk: writing a checkpoint fails half-way, as on a full disk."""
    path = write(tmp_path, settings | {"model_name": "replay", "convnet_type": "resnet8"})

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    process = Command(["--config", path], prepare=limit)
    _, errors = process.communicate()
    assert process.returncode == 2 and "checkpoint.pt: cannot be written" in errors and "Traceback" not in errors
    assert not list(Path(settings["out"]).rglob("*.partial"))
    assert main(["--config", path]) == 0


def other_data(settings, **sizes):
    """A file with the same name and other data."""
    path = Path(settings["dataset"].removeprefix("npz:"))
    small_data(path, **sizes)
    with np.load(path) as arrays:
        changed = dict(arrays)
    changed["test_x"][0, 0, 0, 0] ^= 1
    np.savez(path, **changed)


@pytest.mark.parametrize("stop, line", [(2, "resumes with train epoch 3/3"), (3, "resumes after train epoch 3/3")])
def test_the_log_tells_where_a_run_resumes(stop, line, settings):
    config = resolve(settings | {"model_name": "replay", "cache_first_task": False})
    with killed_at(stop):
        Run(config, load_dataset(config.dataset, ".")).execute()
    Run(config, load_dataset(config.dataset, ".")).execute()
    assert (run_folder(config) / "log.txt").read_text().count(f"task 1/3 {line}\n") == 1


@pytest.mark.slow
def test_a_result_with_keys_of_another_version_is_named_and_costs_the_other_runs_nothing(settings, tmp_path, capsys):
    path = write(tmp_path, settings | {"model_name": "replay", "seed": [1, 2], "epochs": 1, "init_epoch": 1})
    assert main(["--config", path]) == 0
    first, second = sorted(results(settings))
    result = json.loads((first / "result.json").read_text())
    (first / "result.json").write_text(json.dumps(result | {"config": result["config"] | {"invented": 3}}))
    (second / "result.json").unlink()
    capsys.readouterr()
    assert main(["--config", path]) == 1
    line = f"{first / 'result.json'}: was made by another version of pycil_wsc (unknown key 'invented'"
    assert line in capsys.readouterr().err and (second / "result.json").exists()


@pytest.mark.parametrize("sizes", [{}, {"per_class": 9}, {"size": 10}])
def test_a_finished_run_of_other_data_is_not_taken_for_this_one(sizes, settings, tmp_path, capsys):
    path = write(tmp_path, settings | {"model_name": "finetune", "epochs": 1, "init_epoch": 1})
    assert main(["--config", path]) == 0
    ((folder, result),) = results(settings).items()
    small_data(settings["dataset"].removeprefix("npz:"))
    assert main(["--config", path]) == 0, "the same data in a file written anew"
    other_data(settings, **sizes)
    capsys.readouterr()
    assert main(["--config", path]) == 1
    error = capsys.readouterr().err
    assert (
        f"{folder / 'result.json'}: was made with other data (then 72 training and 72 test samples" in error
        and error.count("\n") == 1
    )
    del result["data"]  # as of an earlier version
    (folder / "result.json").write_text(json.dumps(result))
    assert main(["--config", path]) == 0


@pytest.mark.parametrize("name", ["forgetting", "parameters"])
def test_a_metric_with_the_name_of_another_field_is_refused_before_any_training(
    name, settings, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(registry.metrics, name, lambda history: 0.0)
    assert main(["--config", write(tmp_path, settings)]) == 2
    assert f"error: register_metric: '{name}' is a field of every result" in capsys.readouterr().err
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_the_time_that_analyses_take_is_not_counted_as_training(settings, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def record(records, *epoch):
        clock.now += 100

    monkeypatch.setattr("pycil_wsc.runs.run.time", clock)
    monkeypatch.setattr("pycil_wsc.runs.journal.time", clock)
    monkeypatch.setattr("pycil_wsc.studies.records.Records.epoch_ended", record)
    config = resolve(settings | {"model_name": "finetune", "epochs": 3, "init_epoch": 3, "checkpoint_seconds": 1e9})
    result = Run(config, load_dataset(config.dataset, ".")).execute()
    assert (result["train_seconds"], result["total_seconds"]) == (0, 3 * 3 * 100)


@pytest.mark.parametrize("least, saved", [(5, [8, 43]), (0, [4, 11, 18, 25, 32, 39, 46, 53, 60, 67, 74, 81])])
def test_saving_takes_at_most_a_tenth_of_the_time(least, saved, settings, monkeypatch):
    """An epoch takes four seconds and a checkpoint three: the next one is written after thirty, unless it is to be
    written after each epoch. The task ends with another one.
    """
    clock, times = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now), []

    def trained(records, *epoch):
        clock.now += 4

    def save(path, state):
        times.append(clock.now)
        clock.now += 3

    monkeypatch.setattr("pycil_wsc.runs.run.time", clock)
    monkeypatch.setattr("pycil_wsc.runs.journal.time", clock)
    monkeypatch.setattr("pycil_wsc.studies.records.Records.epoch_ended", trained)
    monkeypatch.setattr("pycil_wsc.runs.run.save_state", save)
    keys = {"model_name": "finetune", "init_epoch": 12, "max_tasks": 1, "cache_first_task": False}
    run_of(settings | {"checkpoint_seconds": least}, **keys).execute()
    assert times[: len(saved)] == saved and len(times) == len(saved) + 1


def test_the_commit_in_a_result_is_that_of_the_code_unless_it_is_given(settings, tmp_path, monkeypatch):
    config = resolve(settings | {"model_name": "finetune", "epochs": 1, "init_epoch": 1})
    monkeypatch.setenv("PYCIL_WSC_COMMIT", "the driver's")
    assert Run(config, load_dataset(config.dataset, ".")).execute()["commit"] == "the driver's"
    for name in ("PYCIL_WSC_COMMIT", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    code = tmp_path / "checkout" / "pycil_wsc" / "reproducibility.py"
    code.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(code))
    assert environment.commit() is None, "not a checkout"
    if not shutil.which("git"):
        pytest.skip("git is not installed")

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@test", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=code.parent, capture_output=True, text=True, check=True).stdout.strip()

    code.write_text("one = 1")
    subprocess.run(["git", "init"], cwd=tmp_path / "checkout", capture_output=True, check=True)
    git("add", code.name)
    git("commit", "--message", "first")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and environment.commit() == head
    code.write_text("one = 2")
    assert environment.commit() == f"{head}-dirty"
    installed = code.parent / ".venv/lib/site-packages/pycil_wsc/reproducibility.py"
    monkeypatch.setattr(environment, "__file__", str(installed))
    installed.parent.mkdir(parents=True)
    assert environment.commit() is None, "installed in another project's checkout"


@pytest.mark.slow
def test_dropout_repeats_itself_and_a_stopped_run_resumes_with_it(settings, tmp_path, monkeypatch):
    """Whatever random numbers were drawn before."""

    def dropping_out():
        network = nn.Sequential(make_backbone("resnet8"), nn.Dropout(0.5), nn.BatchNorm1d(64))
        network.out_dim = 64
        return network

    monkeypatch.setitem(registry.backbones, "dropping_out", dropping_out)
    found = []
    for number, stops in enumerate((None, None, 2)):
        config = resolve(settings | {"convnet_type": "dropping_out", "out": str(tmp_path / str(number))})
        dataset = load_dataset(config.dataset, ".")
        torch.manual_seed(number)
        if stops:
            with killed_at(stops):
                Run(config, dataset).execute()
        torch.manual_seed(number + 10)
        found.append(without_measurements(Run(config, dataset).execute()))
    assert found[0] == found[1] == found[2]
    without = Run(resolve(settings | {"convnet_type": "resnet8"}), dataset).execute()
    assert found[0]["train_loss"] != without["train_loss"]


def test_a_stopped_run_does_not_go_on_with_other_data(settings, tmp_path, capsys):
    config = resolve(settings | {"model_name": "replay"})
    with killed_at(2):
        Run(config, load_dataset(config.dataset, ".")).execute()
    other_data(settings)
    path = write(tmp_path, settings | {"model_name": "replay"})
    assert main(["--config", path]) == 1
    error = capsys.readouterr().err
    assert (
        "checkpoint.pt: was made with other data (then 72 training and 72 test samples" in error
        and error.count("\n") == 1
    )
    small_data(settings["dataset"].removeprefix("npz:"))
    assert main(["--config", path]) == 0


def test_a_broken_checkpoint_is_named(settings, tmp_path, capsys):
    path = write(tmp_path, settings)
    folder = run_folder(resolve(settings))
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").write_bytes(b"not a checkpoint")
    assert main(["--config", path]) == 1
    assert "checkpoint.pt: is damaged or not a checkpoint of this version" in capsys.readouterr().out
    save_state(folder / "checkpoint.pt", {"position": 1})
    assert main(["--config", path]) == 1
    assert "checkpoint.pt: is not a checkpoint of this version" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["result.json", "checkpoint.pt"])
def test_what_cannot_be_read_is_not_called_broken(name, settings, tmp_path, capsys):
    """A folder in its place stands in for a file without permissions, which root reads all the same."""
    folder = run_folder(resolve(settings))
    (folder / name).mkdir(parents=True)
    assert main(["--config", write(tmp_path, settings)]) == 1
    error = capsys.readouterr().err
    assert f"{folder / name}: cannot be read (Is a directory); make it readable" in error and "delete" not in error


def test_a_checkpoint_beside_a_result_is_removed(settings, tmp_path):
    config = resolve(settings | {"model_name": "finetune", "epochs": 1, "init_epoch": 1})
    path = write(tmp_path, config.to_dict())
    assert main(["--config", path]) == 0
    (run_folder(config) / "checkpoint.pt").write_bytes(b"of a process that was killed at the very end")
    assert main(["--config", path]) == 0
    assert not (run_folder(config) / "checkpoint.pt").exists()


def test_a_loop_of_links_in_a_run_folder_is_no_obstacle(settings, tmp_path):
    config = resolve(settings | {"model_name": "finetune", "epochs": 1, "init_epoch": 1})
    run_folder(config).mkdir(parents=True)
    for name in ("loop", "result.json"):
        (run_folder(config) / name).symlink_to(name)
    assert main(["--config", write(tmp_path, config.to_dict())]) == 0
    assert not (run_folder(config) / "result.json").is_symlink() and len(results(settings)) == 1


SPLITS = [("replay", 50, 10), ("foster", 20, 20), ("bic", 5, 5)]  # B50-Inc10, B0-Inc20, T=20
SPLITS += [pytest.param(*split, marks=pytest.mark.slow) for split in [("der", 10, 10), ("wsc", 2, 2)]]  # T=10, T=50
HUNDRED = {"memory_per_class": 2, "compression_epochs": 1, "wsc.warmup": 0.5}


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name, init_cls, increment", SPLITS)
def test_the_usual_splits_of_a_hundred_classes_are_learned_and_reported(name, init_cls, increment, settings, tmp_path):
    data = small_data(tmp_path / "hundred.npz", classes=100, per_class=2)
    keys = {"model_name": name, "epochs": 2 if name == "wsc" else 1}  # one of warm-up, and one after it
    learned_and_reported(settings | HUNDRED | keys, data, 100, init_cls, increment)


DIVIDED = ("gss", "hal", "xder")  # whose memory has a size in total
MEMORIES = [(name, 1000) for name in sorted(registry.learners) if name not in DIVIDED]
MEMORIES += [
    (name, 0)
    for name, learner in sorted(registry.learners.items())
    if learner.Plan.uses_memory and not learner.Plan.needs_exemplars and name not in DIVIDED
]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name, memory", MEMORIES)
def test_every_learner_learns_tasks_of_unequal_size_at_the_planned_cost(name, memory, settings, tmp_path):
    """Of three, two and one class; with a quota above the class size, and without memory if the learner can do so."""
    keys = {"model_name": name, "memory_per_class": memory, "epochs": 1, "checkpoint_seconds": 3600}
    keys |= {"fixed_memory": True, "m_rate_list": [0.0], "c_rate_list": [0.0]}  # RMM's rates would change the memory
    keys |= suited(name)
    config, result = learned(settings | keys, small_data(tmp_path / "six.npz", per_class=6), 6, 3, 2)
    assert result["images_trained"] == planned_images(config, tasks_of(load_dataset(config.dataset, "."), config))
    uses_memory = registry.learners[name].Plan.uses_memory
    assert exemplars_kept(run_folder(config)) == [min(memory, 6) * seen * uses_memory for seen in (3, 5, 6)]
    # PyCIL gives the prototypes of these methods the place of the means of exemplars
    has_means = name in PROTOTYPES or memory > 0 and uses_memory
    assert (result["nme_curve"] is not None) == (has_means and config.nme)


@pytest.mark.slow
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
@hypothesis.given(strategies.data())
def test_any_split_is_learned_and_reported(tmp_path_factory, drawn):
    classes = drawn.draw(strategies.integers(2, 12))
    init_cls, increment = (drawn.draw(strategies.integers(1, classes)) for _ in range(2))
    folder = tmp_path_factory.mktemp("split")
    data = small_data(folder / "data.npz", classes=classes, per_class=2)
    keys = {"model_name": "finetune", "epochs": 1, "checkpoint_seconds": 3600, "out": str(folder)}
    learned_and_reported(SETTINGS | keys, data, classes, init_cls, increment)


def learned(settings, data, classes, init_cls, increment):
    """The configuration and the result: a matrix row per task, whatever its number of classes, and forgetting by its
    definition.
    """
    keys = {"dataset": f"npz:{data}", "init_cls": init_cls, "increment": increment, "batch_size": 512, "init_epoch": 1}
    config = resolve(settings | keys)
    with without_checkpoints():
        result = Run(config, load_dataset(config.dataset, ".")).execute()
    starts = [0, *range(init_cls, classes, increment)]
    sizes = np.diff([*starts, classes])[: config.max_tasks]
    tasks, matrix = len(sizes), result["matrix"]
    assert [len(row) for row in matrix] == list(range(1, tasks + 1))
    assert np.allclose(result["curve"], [np.average(row, weights=sizes[: len(row)]) for row in matrix])
    drops = [max(row[task] for row in matrix[task:]) - matrix[-1][task] for task in range(tasks - 1)]
    assert np.isclose(result["forgetting"], np.mean(drops) if drops else 0)
    return config, result


def learned_and_reported(settings, *data_and_split):
    config, result = learned(settings, *data_and_split)
    with undrawn():
        page = report.write_report(Path(config.out, config.prefix))
    (table,) = (page.parent / "tables").glob("measures-*.csv")
    reported = {line["column"]: float(line["mean"]) for line in lines_of(page.parent, table.stem) if line["mean"]}
    for column, key in (("average", "avg_acc"), ("last", "last_acc"), ("forgetting", "forgetting")):
        assert reported[column] == pytest.approx(result[key])


def test_the_task_incremental_accuracy_is_that_of_the_tasks_own_logits(settings):
    """Recomputed from the saved weights: each test image chooses among the two classes of its task."""
    config = resolve(settings | {"save_weights": True, "model_name": "replay", "epochs": 1, "batch_size": 10})
    run = Run(config, load_dataset(config.dataset, "."))
    result = run.execute()
    logits = pycil_wsc.load(run.folder).logits(run.dataset.test.images).numpy()  # columns by label
    position = {label: place for place, label in enumerate(result["class_order"])}
    right = newest = 0
    for row, label in zip(logits, run.dataset.test.targets):
        task = position[label] // 2
        own = result["class_order"][2 * task : 2 * task + 2]
        right += own[int(np.argmax(row[own]))] == label
        newest += task == 2 and own[int(np.argmax(row[own]))] == label
    assert result["task_known_curve"][-1] == pytest.approx(100 * right / len(logits))
    assert result["new_known_curve"][-1] == pytest.approx(100 * newest / (len(logits) / 3))
    assert [len(row) for row in result["task_known_matrix"]] == [1, 2, 3]
    assert np.mean(result["task_known_matrix"][-1]) == pytest.approx(100 * right / len(logits))  # tasks of one size
    assert result["task_known_matrix"][-1][-1] == result["new_known_curve"][-1]
    assert result["task_known_curve"][0] == result["curve"][0] and result["task_known_curve"][-1] > result["curve"][-1]
