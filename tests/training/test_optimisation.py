"""Optimisers, rates, clipping, smoothing and frozen parts: against torch's own, in a plain loop."""

import math

import pytest
import torch
from support.methods import SILENT, after, one_of_each_family
from support.small_runs import killed_at, run_of, suited, without_measurements, write
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from pycil_wsc import registry
from pycil_wsc.config.loading import load, parse_override, resolve
from pycil_wsc.consolidation.averaging import whole_part
from pycil_wsc.consolidation.epochs import warmup_in_steps
from pycil_wsc.consolidation.options import EpochOptions
from pycil_wsc.errors import UserError
from pycil_wsc.keys import declared
from pycil_wsc.methods.consolidation.triggers import Plateau
from pycil_wsc.networks.backbone_options import BackboneOptions
from pycil_wsc.networks.nets import ExpandingNet
from pycil_wsc.training import budget
from pycil_wsc.training.batches import Sampling
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.learner_config import OptimizerOptions
from pycil_wsc.training.optimizers.schedules import cosine_lr, held_lr, warmed_lr


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
@pytest.mark.parametrize("optimizer, made", [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_a_task_is_the_plain_loop_with_torchs_optimiser_and_schedulers(optimizer, made, unit, settings):
    keys = {"model_name": "replay", "optimizer": optimizer, "betas": [0.8, 0.95], "init_weight_decay": 0.1}
    keys |= {"warmup_epochs": 1, "scheduler": "cosine", "min_lr": 1e-4, "schedule_unit": unit, "init_lr": 0.01}
    keys |= {"label_smoothing": 0.2, "clip_norm": 0.5, "init_epoch": 4, "precision": "fp32"}
    ours, plain = (run_of(settings, **keys).learner for _ in range(2))
    task = ours.manager.tasks[0]
    ours.learn(task, SILENT)

    grow_for(plain, task)
    indices, network = task.train_indices, plain.network
    per_epoch = math.ceil(len(indices) / 8) if unit == "iteration" else 1
    optimizer = made(network.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, fused=True)
    schedule = torch_schedule(optimizer, per_epoch, 4 * per_epoch, 1e-4)
    network.train()
    for epoch in range(4):
        for batch in plain.batches.of(Sampling(indices=indices), 0, 0, epoch):
            images, targets = batch.images, batch.targets
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


WITH_ADAMW = ["memo", "ssre"]  # networks with a shared trunk, with adapters
WITH_ADAMW += ["bic", "foster", "podnet"]  # with phases of other parameters
WITH_ADAMW += ["fetril", "redo"]  # the head alone; that moves moments
FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in ("replay", "beef", "coil", "sam")]


@pytest.mark.parametrize("name", [*WITH_ADAMW, *FURTHER])
def test_learners_learn_with_adamw(name, settings):
    keys = {"model_name": name, "optimizer": "adamw", "layer_decay": 0.7, "checkpoint_seconds": 3600}
    keys |= {"convnet_options.width": 16}
    keys |= {"compression_epochs": 4, "max_tasks": 2, "label_smoothing": 0.0 if name == "podnet" else 0.1}
    result = run_of(settings, clip_norm=1.0, precision="fp32", **keys).execute()
    first, other = result["train_loss"]
    assert len(first) == 3 and first[-1] < first[0]
    assert len(other) == {"bic": 8, "foster": 8, "podnet": 5, "beef": 5}.get(name, 4)
    starts = [0, 4] if name == "foster" else [0]  # of its phases; in BiC's second one the loss hardly changes
    assert all(other[start + 3] < other[start] for start in starts), other


@pytest.mark.slow
def test_a_killed_run_resumes_with_adamws_moments(settings, tmp_path):
    keys = {"optimizer": "adamw", "schedule_unit": "iteration", "scheduler": "cosine"}
    whole = run_of(settings, out=str(tmp_path / "whole"), **keys).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 2, "phase": 0, "epoch": 2}):
        run_of(settings, **keys).execute()
    assert without_measurements(run_of(settings, **keys).execute()) == without_measurements(whole)


# ---- the rate after the reset, and when it comes ---------------------------------------------------------------------


@pytest.mark.parametrize("per_epoch", [1, 4, 7])
@pytest.mark.parametrize("start, anneal", [(2, 3), (3, 1), (0, 2)])
def test_the_held_rate_follows_half_a_cosine_from_the_last_one_before(start, anneal, per_epoch):
    """In steps: the k-th of the n steps of the annealing is k / n along it, so no rate is met twice or left out."""
    schedule, value, interval = cosine_lr(0.1, 8), 0.03, 1 / per_epoch
    rate = held_lr(schedule, start, value, anneal, interval)
    last = schedule(max(0, start - interval))
    for step in range(8 * per_epoch):
        since, steps = step - start * per_epoch + 1, anneal * per_epoch
        along = min(1, since / steps)
        held = value + (last - value) * (1 + math.cos(math.pi * along)) / 2
        assert rate(step / per_epoch) == pytest.approx(schedule(step / per_epoch) if since < 1 else held)
    if start:
        jump = abs(rate(start) - rate(start - interval))
        assert jump <= (last - value) * (1 - math.cos(math.pi / (anneal * per_epoch))) / 2 + 1e-9


def begun(learner, task):
    """The first phase of a task as the loop begins it, at its consolidation."""
    phase = next(iter(learner.phases(task)))
    run = budget.planned(learner, task, 0, phase)
    learner.begin_phase(task, run)
    return run


@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_run_sets_the_held_rate_at_every_step(unit, settings):
    keys = {"schedule_unit": unit, "scheduler": "cosine", "wsc.warmup": 0.5, "wsc.average_lr": 0.03}
    learner = run_of(settings, **keys, **{"wsc.average_anneal": 1}).learner
    for task in learner.manager.tasks[:2]:
        grow_for(learner, task)
    run = begun(learner, learner.manager.tasks[1])
    steps = run.batches if unit == "iteration" else 1
    plain, last = cosine_lr(0.1, 4), cosine_lr(0.1, 4)(2 - 1 / steps)
    for step in range(steps):
        along = (1 + math.cos(math.pi * (step + 1) / steps)) / 2
        assert run.lr(1 + step / steps) == pytest.approx(plain(1 + step / steps))
        assert run.lr(2 + step / steps) == pytest.approx(0.03 + (last - 0.03) * along)
    assert run.lr(3) == pytest.approx(0.03)


def test_a_share_of_the_epochs_is_that_of_the_decimal_number():
    """0.7 * 170 and 0.29 * 100 are below 119 and 29 in floating point."""
    for percent in range(101):
        for number in (*range(1, 301), 12_345, 1_000_000):
            assert whole_part(percent / 100, number) == percent * number // 100
    assert (warmup_in_steps(0.7, 170, 20), warmup_in_steps(0.29, 100)) == (119 * 20, 29)
    assert (warmup_in_steps(0.1, 4, 20), warmup_in_steps(0.01, 4, 20, resets=True)) == (8, 1)
    assert EpochOptions(warmup=0.1).held_from(4, 8) == 1


@pytest.mark.parametrize(
    "keys, steps, held",
    [
        ({"wsc.warmup": 0.29}, 29, 29),
        ({"wsc.warmup": 0.0}, 1 / 2, 1),  # a step to rank weights by
        ({"wsc.warmup": 0.0, "wsc.reset": "none"}, 0, 0),
    ],
)
def test_averaging_begins_and_the_rate_is_held_from_the_same_epoch(keys, steps, held, settings):
    """``steps`` in epochs; a warm-up of less than an epoch ends within it."""
    options = {"epochs": 100, "milestones": [90], "batch_size": 12, "memory_per_class": 0}
    learner = run_of(settings, **options, **{"wsc.average_lr": 0.03, "wsc.average_anneal": 0}, **keys).learner
    for task in learner.manager.tasks[:2]:
        grow_for(learner, task)
    run = begun(learner, learner.manager.tasks[1])
    assert run.batches == 2
    assert learner.consolidation.wsc.warmup_steps == 2 * steps
    assert [run.lr(epoch) for epoch in range(40)] == [0.1] * held + [0.03] * (40 - held)
    assert learner.consolidation.wsc.averaged == (not held)


@pytest.mark.parametrize("name", ["fisher", "hessian"])
def test_held_out_exemplars_take_no_part_in_scores_and_statistics(name, settings, monkeypatch):
    monkeypatch.setattr(Plateau, "reached", lambda self, loss: True)
    keys = {"wsc.trigger": "held_out", "wsc.held_out": 0.5, "wsc.importance": name, "max_tasks": 2}
    learner = run_of(settings, **keys).learner
    held, used = [], []
    begin, batches = learner.begin_phase, learner.batches.source.batches

    def begin_phase(task, phase):
        begin(task, phase)
        if learner.consolidation:
            held.append(set(learner.batches.held_out.tolist()))

    def watched(indices, *arguments, **options):
        used.append((set(indices.tolist()), options.get("train", False)))
        return batches(indices, *arguments, **options)

    monkeypatch.setattr(learner, "begin_phase", begin_phase)
    for task in learner.manager.tasks:
        monkeypatch.setattr(learner.batches.source, "batches", watched if task.index else batches)
        learner.learn(task, SILENT)
    (held,) = held
    assert len(held) == 4, "of 2 classes with 4 exemplars each"
    trained = [indices for indices, train in used if train]
    scored = [indices for indices, train in used if not train and indices & trained[0]]
    assert len(trained) == learner.config.epochs + 1, "the last pass is for batch norm"
    assert trained[0] in scored and not any(indices & held for indices in trained)
    assert [indices for indices in scored if indices & held] == []
    assert learner.scoring["importance_passes"] == 1


def test_fosters_student_starts_from_the_teacher_and_loads_no_weights(settings, monkeypatch):
    learner = run_of(settings, model_name="foster", init_epoch=1, epochs=1, compression_epochs=1).learner
    built, new_backbone = [], learner.new_backbone

    def noted(pretrained=None):
        built.append(pretrained)
        return new_backbone(pretrained)

    monkeypatch.setattr(learner, "new_backbone", noted)
    for task in learner.manager.tasks[:2]:
        grow_for(learner, task)
    assert built == [False]
    teacher, student = (net.blocks[0].state_dict() for net in (learner.network, learner.student))
    assert all(torch.equal(teacher[name], student[name]) for name in teacher)


# ---- which parts are trained -----------------------------------------------------------------------------------------


def test_rates_fall_with_the_distance_from_the_head(settings):
    settings |= {"convnet_type": "resnet8"}
    for name, parts in (("replay", ["backbone"]), ("memo", ["trunk", "blocks.0"])):
        learner = run_of(settings, model_name=name, backbone_lr_factor=0.5, layer_decay=0.1).learner
        grow_for(learner, learner.manager.tasks[0])
        groups = learner.main_phase(learner.manager.tasks[0], weight_decay=0.0).optimizer.param_groups
        scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
        assert {scales[id(p)] for p in learner.network.head.parameters()} == {1.0}
        found = {}
        for part in parts:
            for child, module in learner.network.get_submodule(part).named_children():
                for parameter in module.parameters():
                    found.setdefault(f"{part}.{child}", set()).add(round(scales[id(parameter)], 10))
        expected = [0.5 * 0.1**depth for depth in (4, 3, 2, 1)]  # stem, three stages
        assert [pytest.approx(scale) for values in found.values() for scale in values] == expected


def test_the_branch_that_aper_tunes_has_the_backbones_rate(settings):
    learner = run_of(settings, model_name="aper_finetune", backbone_lr_factor=0.5).learner
    for task in learner.manager.tasks[:2]:
        learner.learn(task, SILENT)
    groups = learner.main_phase(task, learner.network.tuned.parameters(), weight_decay=0.0).optimizer.param_groups
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    branch, head = learner.network.tuned
    assert {scales[id(p)] for p in branch.parameters()} == {0.5} and {scales[id(p)] for p in head.parameters()} == {1}


class Nested(nn.Module):
    """A backbone whose trunk is one child with layers of its own."""

    out_dim = 16

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2))
        self.block = nn.Sequential(nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.block(self.trunk(x))

    def split(self):
        return self.trunk, self.block


def test_a_split_with_parameters_of_its_own_has_depths(monkeypatch):
    network = ExpandingNet(Nested(), share_trunk=True)
    assert {network.depths()[p] for p in network.trunk.parameters()} == {2}
    monkeypatch.setattr(Nested, "split", lambda self: (self.trunk, nn.Sequential(nn.Conv2d(16, 16, 1), self.block)))
    network = ExpandingNet(Nested(), share_trunk=True)
    assert network.depths().keys() == {*network.trunk.parameters(), *network.blocks.parameters()}


@pytest.mark.parametrize(
    "keys",
    [{"layer_decay": 0.5}, {"freeze": [name for name, _ in Nested().named_parameters()]}],
    ids=["layer_decay", "freeze by the names of all parameters"],
)
def test_expanding_networks_train_the_first_task_like_any_other(keys, settings, monkeypatch):
    monkeypatch.setitem(registry.backbones, "nested", Nested)
    trained = []
    for name in ("replay", "der", "memo"):
        learner = run_of(settings, model_name=name, convnet_type="nested", precision="fp32", **keys).learner
        learner.learn(learner.manager.tasks[0], SILENT)
        trained.append([tensor for part in learner.network.first_parts() for tensor in part.state_dict().values()])
    for others in trained[1:]:
        assert all(torch.equal(one, other) for one, other in zip(trained[0], others, strict=True))


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("name", one_of_each_family([name for name in sorted(registry.learners) if not suited(name)]))
def test_frozen_parts_keep_weights_and_statistics(name, settings):
    keys = {"model_name": name, "freeze": ["stem", "stage1.0.conv1"], "precision": "fp32", "init_epoch": 1, "epochs": 1}
    keys |= {"convnet_type": "resnet8"} if name == "memo" else {}  # of "tiny", its blocks are all but the stem
    learner = run_of(settings, **keys).learner
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
        if task.index and (name in ("fetril", "ssre") or not registry.learners[name].Plan.epoch_keys):
            continue  # they train it in the first task alone, or adapters beside it
        assert [name for name in moved if f"{first}conv2" in name] and [name for name in moved if f"{first}bn1" in name]


def test_a_frozen_backbone_leaves_the_head_to_learn(settings):
    learner = run_of(settings, model_name="replay", freeze=["backbone"]).learner
    before = [p.clone() for p in learner.network.backbone.parameters()]
    learner.learn(learner.manager.tasks[0], SILENT)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.network.backbone.parameters()))
    assert learner.network.head.bias.any()


def test_adamw_has_defaults_of_its_own_and_they_give_way():
    config = resolve({"model_name": "joint", "optimizer": "adamw", "lrate": 0.5})
    assert (config.init_lr, config.lrate, config.weight_decay, config.wsc.average_lr) == (1e-3, 0.5, 0.01, None)
    assert resolve(config.to_dict()) == config
    assert resolve({"model_name": "joint"}).weight_decay == 5e-4


def test_a_learners_optimiser_is_its_own_default_and_another_one_brings_its_rates(monkeypatch):
    monkeypatch.setitem(registry.learner_defaults, "replay", {"optimizer": "adam", "lrate": 0.02})
    own, other = resolve({"model_name": "replay"}), resolve({"model_name": "replay", "optimizer": "adamw"})
    assert (own.optimizer, own.init_lr, own.lrate, own.weight_decay, own.wsc.average_lr) == (
        "adam",
        1e-3,
        0.02,
        0,
        None,
    )
    assert (other.init_lr, other.lrate, other.weight_decay) == (1e-3, 1e-3, 0.01)
    assert resolve({"model_name": "replay", "optimizer": "adam"}) == own


def test_an_optimiser_that_is_refused_leaves_the_defaults_of_the_one_with_its_name():
    before = resolve({"optimizer": "adamw"})
    with pytest.raises(UserError, match="optimizer 'adamw' is registered by"):
        registry.register_optimizer("adamw", init_lr=123.0)(lambda groups, config: None)
    assert resolve({"optimizer": "adamw"}) == before


def test_what_decides_training_decides_the_first_task():
    """Runs that agree on these keys share a first task, even if they differ in others."""
    training = {**declared(BackboneOptions), **declared(OptimizerOptions)}
    assert training.keys() <= resolve({}).first_task().keys()


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


@pytest.mark.parametrize(
    "text, name, value",
    [
        ('wsc={"retain":0.5}', "wsc.retain", 0.5),
        ('convnet_options={"width":8}', "convnet_options.width", 8),
        ('budget={"updates_like":"wsc"}', "epochs", 4),
    ],
)
def test_an_object_on_the_command_line_is_what_it_is_in_the_file(text, name, value, settings, tmp_path):
    """The keys of a group, of which the file's others are kept."""
    path = write(tmp_path, settings | {"wsc": {"warmup": 0.5}, "convnet_options": {"width": 5}})
    (config,) = load(path, dict([parse_override(text)]))
    assert config.to_dict()[name] == value and config.wsc.warmup == 0.5


def test_a_part_that_is_not_there_is_one_line(settings):
    with pytest.raises(UserError, match="freeze: the backbone has no part 'stage4'; did you mean 'stage"):
        run_of(settings, freeze=["stage4"])


def test_gradients_from_before_a_phase_do_not_enter_its_first_step(digits, tmp_path):
    weights = []
    for left in (0.0, 100.0):
        learner, tasks = after("replay", 1, digits, tmp_path)
        for parameter in learner.parameters():
            parameter.grad = torch.full_like(parameter, left)
        learner.learn(tasks[1], SILENT)
        weights.append(learner.network.head.weight.detach().clone())
    assert torch.equal(*weights)
