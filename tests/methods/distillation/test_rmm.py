"""RMM: how many new images and exemplars there are, of which class, and what FOSTER's weights count."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import rmm as twin
from support.methods import after, grown
from support.small_learners import SMALL, months
from support.small_runs import killed_at, without_measurements
from torch import nn

from pycil_wsc import Learner
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.launch.command import main
from pycil_wsc.methods.distillation.rmm import memory_size
from pycil_wsc.methods.losses import balanced_weights
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner import grow_for

__all__ = ["months"]
RATES = {"m_rate_list": [0.8, 0.0, 0.3], "c_rate_list": [0.2, 0.0, 0.3], "memory_size": 200, "memory_per_class": 20}
LARGEST = 147  # images of the largest class of the digits


@pytest.mark.parametrize("rates", [[0.8, 0.8, 0.6], [0.0, 0.3, 0.0], [0.29]])
@pytest.mark.parametrize("usual", [20, 2000])
def test_the_memory_grows_by_the_share_that_the_images_lose(digits, tmp_path, rates, usual):
    keys = {"m_rate_list": rates, "memory_size": usual, "memory_per_class": 20}
    learner, tasks = grown("rmm-icarl", 0, digits, tmp_path, **keys)
    expected = twin.sizes([*rates, *rates[-1:] * 2][:3], [4, 7, 10], usual, 3, LARGEST)
    assert [memory_size(learner.config, task, learner.manager) for task in tasks] == expected


def test_with_uneven_tasks_the_memory_grows_by_a_share_of_the_tasks_own_classes(digits, tmp_path):
    keys = {"m_rate_list": [0.5], "memory_size": 20, "memory_per_class": 20}
    even, tasks = grown("rmm-icarl", 0, digits, tmp_path, **keys)
    config = replace(even.config, increments=(4, 3, 3))
    sizes = [memory_size(config, task, even.manager) for task in tasks]
    assert sizes == [20 + int(0.5 * classes * LARGEST) for classes in (4, 3, 3)]


def test_later_tasks_train_on_images_drawn_once_with_replacement(digits, tmp_path):
    learner, tasks = grown("rmm-icarl", 0, digits, tmp_path, **RATES)
    targets = learner.manager.train_targets
    for task, rate in zip(tasks, (0.0, 0.0, 0.3)):
        mine = learner.plan.new_samples(task, learner.manager.train_targets)
        own = np.bincount(targets[task.train_indices])
        expected = [int((1 - rate) * count) for count in own]
        assert np.bincount(targets[mine]).tolist() == expected
        assert np.isin(mine, task.train_indices).all() and (np.diff(targets[mine]) >= 0).all()
        assert (len(np.unique(mine)) < len(mine)) == bool(rate)
        assert np.array_equal(learner.plan.new_samples(task, learner.manager.train_targets), mine)
    other, tasks = grown("rmm-icarl", 0, digits, tmp_path, **RATES, seed=5)
    assert not np.array_equal(other.plan.new_samples(tasks[2], other.manager.train_targets), mine)


@pytest.mark.parametrize("name", ["rmm-icarl", "rmm-foster"])
def test_new_classes_above_the_median_loss_get_fewer_exemplars(digits, tmp_path, name):
    """The losses are those of all images of a class, one by one, and measuring them changes nothing."""
    learner, tasks = grown(name, 3, digits, tmp_path, **RATES)
    targets, before, losses = learner.manager.train_targets, [each.clone() for each in learner.buffers()], []
    learner.train()
    learner.end_task(tasks[2])
    found = learner.plan.quotas(tasks[2], learner.manager)
    assert all(torch.equal(now, then) for now, then in zip(learner.buffers(), before))
    for label in range(7, 10):
        indices = tasks[2].train_indices[targets[tasks[2].train_indices] == label]
        logits = [learner.predict(x) for x, _ in learner.batches.source.batches(indices, targets, 7)]
        losses.append(-torch.cat(logits).log_softmax(1)[:, label].mean().item())
    size = twin.sizes([0.8, 0.0, 0.3], [4, 7, 10], 200, 3, LARGEST)[2]
    assert found == twin.exemplars(size, 7, losses, 0.3, LARGEST) and len(set(found)) == 3


@pytest.mark.parametrize("epochs, moved", [(1, False), (3, True), (6, False), (200, True)])
def test_after_the_first_task_batch_norm_sees_one_class_after_the_other_unless_the_last_epoch_was_tested(
    digits,
    tmp_path,
    epochs,
    moved,
):
    """PyCIL tests every fifth epoch, from the first on, and so leaves training mode. No rate is needed for it."""
    learner, tasks = grown("rmm-icarl", 1, digits, tmp_path, **RATES | {"c_rate_list": [0.0]}, init_epoch=epochs)
    targets, expected = learner.manager.train_targets, copy.deepcopy(learner.network).train()
    for label in range(4 if moved else 0):
        indices = tasks[0].train_indices[targets[tasks[0].train_indices] == label]
        for images, _ in learner.batches.source.batches(indices, targets, learner.config.batch_size):
            expected(images)
    learner.end_task(tasks[0])
    for now, then in zip(learner.network.buffers(), expected.buffers(), strict=True):
        assert torch.allclose(now, then)


def test_the_losses_need_no_batch_of_one_image_and_draw_from_the_seed_alone(digits, tmp_path):
    """A last single image has no variance of its own where maps are 1 x 1, and dropout draws in training mode."""
    learner, tasks = grown("rmm-icarl", 1, digits, tmp_path, **RATES, init_epoch=3)
    count = int((learner.manager.train_targets[tasks[0].train_indices] == 0).sum())
    learner.config = replace(learner.config, batch_size=count - 1)
    learner.network.backbone.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(64), nn.Flatten())
    learner.network.backbone.pool.append(nn.Dropout())
    start, found = copy.deepcopy(learner.network.state_dict()), []
    for seed in (0, 1):
        learner.network.load_state_dict(start)
        torch.manual_seed(seed)
        found.append(learner.mean_losses(tasks[0], training=True))
    assert np.isfinite(found).all() and np.array_equal(*found)


def test_fosters_weights_count_the_size_of_the_memory_and_whole_classes(digits, tmp_path):
    learner, tasks = after("rmm-foster", 1, digits, tmp_path, **RATES, beta1=0.99)
    grow_for(learner, tasks[1])
    next(learner.phases(tasks[1]))
    (size, *_) = twin.sizes([0.8], [4], 200, 3, LARGEST)
    own = np.bincount(learner.manager.train_targets[tasks[1].train_indices])[4:]
    assert torch.equal(learner.weights, balanced_weights(torch.tensor([size // 4] * 4 + own.tolist()), 0.99))


def test_in_a_stream_they_count_the_exemplars_that_there_are(digits, tmp_path):
    """Of earlier tasks it has no other images, whose number PyCIL takes the memory's size from."""
    learner, tasks = after("rmm-foster", 1, digits, tmp_path, **RATES)
    grow_for(learner, tasks[1])
    learner.config = replace(learner.config, tasks=("npz:1.npz", "npz:2.npz"))
    tasks[0] = replace(tasks[0], train_indices=learner.memory.indices)  # those of the sequence itself
    assert learner.class_counts(tasks[1])[:4].tolist() == 4 * [len(learner.memory) // 4]


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_and_trains_on_as_many_images_as_the_memory_says(settings, tmp_path):
    """Classes of unequal size: how many exemplars there are depends on which of them get more."""
    keys = {"model_name": "rmm-icarl", "dataset": "digits", "init_cls": 4, "increment": 3, "memory_size": 900}
    keys |= {"convnet_type": "resnet8", "convnet_options.width": 4, "precision": "fp32", "images_per_class": None}
    keys |= {"m_rate_list": [0.5], "c_rate_list": [0.3], "init_epoch": 1, "epochs": 2, "milestones": []}
    keys |= {"exemplars": "random", "nme": False, "batch_size": 128}

    def run(out):
        config = resolve(settings | keys | {"out": str(out)})
        return Run(config, load_dataset("digits", "."))

    whole = run(tmp_path / "whole").execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 2, "phase": 0, "epoch": 1}):
        run(tmp_path / "stopped").execute()
    again = run(tmp_path / "stopped")
    assert without_measurements(again.execute()) == without_measurements(whole)
    assert sum(again.plan) == whole["images_trained"]


def test_pycils_file_that_trains_a_policy_is_refused_in_one_line(tmp_path, capsys):
    """It names the learner of `rmm-icarl.json`, but neither tasks nor rates."""
    keys = {"prefix": "pretrain-rmm", "dataset": "cifar100", "memory_size": 2000, "shuffle": True, "device": ["0"]}
    path = tmp_path / "rmm-pretrain.json"
    path.write_text(json.dumps(keys | {"model_name": "rmm-icarl", "convnet_type": "resnet32", "seed": [1993]}))
    assert main(["--config", str(path), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "init_cls: is missing" in said.err and "trains a policy in 200 whole runs" in said.err


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"m_rate_list": []}, "m_rate_list: is empty; give a rate for each task"),
        ({"m_rate_list": [1.0]}, "m_rate_list: 1.0 is not below 1"),
        ({"c_rate_list": [-0.1]}, "c_rate_list: -0.1 is below 0"),
        ({"exemplars": "reservoir"}, "exemplars: RMM gives each class a number of its own"),
    ],
)
def test_what_rmm_cannot_use_is_one_line(keys, says):
    with pytest.raises(UserError, match=says):
        resolve({"model_name": "rmm-icarl"} | keys)


def test_in_a_task_list_a_rate_of_0_adds_no_exemplars_to_the_usual_ones(digits, tmp_path):
    """The task gave up no image for them."""
    learner, tasks = after("rmm-icarl", 1, digits, tmp_path, **RATES | {"m_rate_list": [0.8, 0.0], "memory_size": 50})
    config = replace(learner.config, tasks=("npz:1.npz", "npz:2.npz"))
    assert memory_size(config, tasks[1], learner.manager) == 50
    assert memory_size(config, tasks[0], learner.manager) == 50 + int(0.8 * len(tasks[0].train_indices))


def test_a_memory_of_fewer_exemplars_than_classes_is_one_line(settings):
    keys = {"model_name": "rmm-icarl", "dataset": "digits", "init_cls": 4, "increment": 3, "memory_size": 3}
    config = resolve(settings | keys | {"m_rate_list": [0.0], "images_per_class": None})
    with pytest.raises(UserError, match="^memory_size: fewer than one exemplar of each of the 4 classes before task 2"):
        Run(config, load_dataset("digits", "."))


def test_a_learners_memory_that_the_rates_enlarge_may_be_named_smaller_than_the_classes(months):
    """``memory_size`` is what there is beside the exemplars that the tasks give up images for."""
    keys = {name: value for name, value in SMALL.items() if name not in ("memory_per_class", "buffer_size")}
    keys = {name: value for name, value in keys.items() if not name.startswith("proj")}
    learner = Learner("rmm-icarl", **keys | {"memory_size": 2, "fixed_memory": False, "epochs": 1, "init_epoch": 1})
    for month in months:
        learner.learn(month)
    assert len(learner.history) == len(months)
