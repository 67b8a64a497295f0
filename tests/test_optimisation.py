"""Optimisers, rates, clipping, smoothing and frozen parts: against torch's own, in a plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_runs import killed_at, without_measurements
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.config.training import TrainingOptions
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.engine.schedules import cosine_lr, warmed_lr
from pycil_wsc.errors import UserError
from pycil_wsc.keys import declared
from pycil_wsc.runs.run import Run

SILENT = SimpleNamespace(
    **dict.fromkeys(("task_started", "phase_started", "step", "epoch_ended", "task_trained"), lambda *_: None)
)


def run(settings, **keys):
    config = resolve(settings | keys)
    return Run(config, load_dataset(config.dataset, "."))


def torch_schedule(optimizer, warmup, total, min_lr):
    """A linear warm-up, then half a cosine, in steps of the schedulers."""
    schedulers = [CosineAnnealingLR(optimizer, total - warmup, min_lr)]
    if warmup:
        schedulers.insert(0, LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup))
    return SequentialLR(optimizer, schedulers, [warmup] if warmup else [])


@pytest.mark.parametrize("warmup, per_epoch", [(0, 1), (2, 1), (2, 5), (1, 7)])
def test_rates_are_those_of_torchs_schedulers(warmup, per_epoch):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs, ours = (
        torch_schedule(optimizer, warmup * per_epoch, 6 * per_epoch, 0.01),
        warmed_lr(cosine_lr(0.3, 6, 0.01, warmup), warmup, 1 / per_epoch),
    )
    for step in range(6 * per_epoch):
        assert ours(step / per_epoch) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_task_is_the_plain_loop_with_torchs_adamw_and_schedulers(unit, settings):
    keys = {"model_name": "replay", "optimizer": "adamw", "betas": [0.8, 0.95], "init_weight_decay": 0.1}
    keys |= {"warmup_epochs": 1, "scheduler": "cosine", "min_lr": 1e-4, "schedule_unit": unit, "init_lr": 0.01}
    keys |= {"label_smoothing": 0.2, "clip_norm": 0.5, "init_epoch": 4, "precision": "fp32"}
    ours, plain = (run(settings, **keys).learner for _ in range(2))
    task = ours.manager.tasks[0]
    ours.learn(task, SILENT)

    plain.grow_for(task)
    indices, network = task.train_indices, plain.network
    per_epoch = math.ceil(len(indices) / 8) if unit == "iteration" else 1
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    schedule = torch_schedule(optimizer, per_epoch, 4 * per_epoch, 1e-4)
    network.train()
    for epoch in range(4):
        for images, targets in plain.training_batches(indices, 0, 0, epoch):
            loss = cross_entropy(network(images), targets, label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            if unit == "iteration":
                schedule.step()
        if unit == "epoch":
            schedule.step()
    for (name, mine), theirs in zip(ours.network.named_parameters(), network.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_learner_learns_with_adamw(name, settings):
    keys = {"model_name": name, "optimizer": "adamw", "init_epoch": 2, "epochs": 2, "layer_decay": 0.7}
    result = run(settings, label_smoothing=0.1, clip_norm=1.0, **keys).execute()
    assert all(losses[-1] < losses[0] for losses in result["train_loss"][:1]) and len(result["curve"]) == 3


def test_a_killed_run_resumes_with_adamws_moments(settings, tmp_path):
    keys = {"optimizer": "adamw", "schedule_unit": "iteration", "scheduler": "cosine"}
    whole = run(settings, out=str(tmp_path / "whole"), **keys).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 2, "phase": 0, "epoch": 2}):
        run(settings, **keys).execute()
    assert without_measurements(run(settings, **keys).execute()) == without_measurements(whole)


@pytest.mark.parametrize("clears", [False, True])
def test_the_reset_clears_adamws_state_if_asked_to(clears, settings):
    learner = run(settings, optimizer="adamw", **{"wsc.reset_momentum": clears, "wsc.warmup": 0.5}).learner
    optimizers, steps = [], []
    phases = learner.phases

    def watched(task):
        for phase in phases(task):
            optimizers.append(phase.optimizer)
            yield phase

    learner.phases = watched
    learner.after_step = lambda: steps.append(
        {int(state["step"]) for state in optimizers[-1].state.values()} if optimizers[-1].state else {0}
    )
    first, second = learner.manager.tasks[:2]
    learner.learn(first, SILENT)
    steps.clear()
    learner.learn(second, SILENT)
    half = len(steps) // 2
    assert steps[half - 1] == ({0} if clears else {half})
    assert steps[-1] == {half if clears else 2 * half}


def test_rates_fall_with_the_distance_from_the_head(settings):
    for name, parts in (("replay", ["backbone"]), ("memo", ["trunk", "blocks.0"])):
        learner = run(settings, model_name=name, backbone_lr_factor=0.5, layer_decay=0.1).learner
        learner.grow_for(learner.manager.tasks[0])
        groups = learner.optimizer(learner.network.parameters(), 0.0).param_groups
        scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
        assert {scales[id(p)] for p in learner.network.head.parameters()} == {1.0}
        found = {}
        for part in parts:
            for child, module in learner.network.get_submodule(part).named_children():
                for parameter in module.parameters():
                    found.setdefault(f"{part}.{child}", set()).add(round(scales[id(parameter)], 10))
        expected = [0.5 * 0.1**depth for depth in (4, 3, 2, 1)]  # stem, three stages
        assert [pytest.approx(scale) for values in found.values() for scale in values] == expected


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_frozen_parts_keep_weights_and_statistics(name, settings):
    keys = {"model_name": name, "freeze": ["stem", "stage1.0.conv1"], "init_epoch": 1, "epochs": 2, "precision": "fp32"}
    learner = run(settings, **keys).learner
    begin, before = learner.begin_task, {}

    def snapshot(task):
        before.update((name, tensor.clone()) for name, tensor in learner.network.state_dict().items())
        begin(task)

    learner.begin_task = snapshot
    for task in learner.manager.tasks[:2]:
        learner.learn(task, SILENT)
        moved = {name for name, now in learner.network.state_dict().items() if not torch.equal(now, before[name])}
        stem, first = ("trunk.0.", "trunk.1.0.") if name == "memo" else ("stem.", "stage1.0.")
        assert not [name for name in moved if stem in name or f"{first}conv1" in name]
        assert [name for name in moved if f"{first}conv2" in name] and [name for name in moved if f"{first}bn1" in name]


def test_a_frozen_backbone_leaves_the_head_to_learn(settings):
    learner = run(settings, model_name="replay", freeze=["backbone"]).learner
    before = [p.clone() for p in learner.network.backbone.parameters()]
    learner.learn(learner.manager.tasks[0], SILENT)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.network.backbone.parameters()))
    assert learner.network.head.bias.any()


def test_adamw_has_defaults_of_its_own_and_they_give_way():
    config = resolve({"model_name": "joint", "optimizer": "adamw", "lrate": 0.5})
    assert (config.init_lr, config.lrate, config.weight_decay, config.wsc.average_lr) == (1e-3, 0.5, 0.01, None)
    assert resolve(config.to_dict()) == config
    assert resolve({"model_name": "joint"}).weight_decay == 5e-4


def test_what_decides_training_decides_the_first_task():
    """Runs that agree on these keys share a first task, even if they differ in others."""
    assert declared(TrainingOptions).keys() <= resolve({}).first_task().keys()


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"optimizer": "adamwe"}, "unknown optimizer 'adamwe'; did you mean 'adamw'"),
        ({"betas": [0.9]}, "betas: expected two numbers"),
        ({"warmup_epochs": 70}, "warmup_epochs: 70 must be less than the 70 epochs of 'epochs'"),
        (
            {"model_name": "foster", "epochs": 7, "compression_epochs": 5, "warmup_epochs": 5},
            "warmup_epochs: 5 must be less than the 5 epochs of 'compression_epochs'",
        ),
        ({"scheduler": "cosine", "min_lr": 0.2}, "min_lr: 0.2 is above 'init_lr', which is 0.1"),
        ({"clip_norm": 0}, "clip_norm: 0.0 is not above 0"),
        ({"label_smoothing": 1}, "label_smoothing: 1.0 is not below 1"),
    ],
)
def test_wrong_values_are_one_line(keys, line):
    with pytest.raises(UserError, match=line):
        resolve(keys)


def test_a_part_that_is_not_there_is_one_line(settings):
    with pytest.raises(UserError, match="freeze: the backbone has no part 'stage4'; did you mean 'stage"):
        run(settings, freeze=["stage4"])
