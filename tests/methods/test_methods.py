"""Each method follows its paper and PyCIL: its mechanism against a closed form or a slow reference."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.methods import (
    BATCH,
    SILENT,
    SMALL,
    TARGETS,
    after,
    grown,
    images,
    moved,
    negative_log_likelihood,
    perturb,
    snapshot,
)
from support.small_runs import batch_of
from torch.utils.flop_counter import FlopCounterMode

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split
from pycil_wsc.methods.losses import balanced_weights
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import ExpandingNet, make_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.training import budget, loop
from pycil_wsc.training.learner import grow_for

SMALL = SMALL | {"device": "cpu", "precision": "fp32", "exemplars": "random"}


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory, ratio", [(20, 1.79), (80, 1.04), (200, 1.00), (500, 1.00)])
def test_fosters_class_weights_are_the_known_ones(memory, ratio):
    weights = balanced_weights(torch.tensor([memory] * 10 + [500] * 10), 0.96)
    assert (weights[0] / weights[-1]).item() == pytest.approx(ratio, abs=0.005)
    assert weights.sum().item() == pytest.approx(20, abs=1e-3)


def test_a_class_without_samples_weighs_as_one_with_one():
    weights = balanced_weights(torch.tensor([0, 1, 500]), 0.97)
    assert weights[0] == weights[1] and weights.isfinite().all()


# ---- distilling learners ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["icarl", "wa", "bic"])
def test_the_teacher_is_the_network_of_the_task_before_and_does_not_learn(name, digits, tmp_path):
    learner, tasks = after(name, 1, digits, tmp_path)
    before = snapshot(learner.network)
    learner.learn(tasks[1], SILENT)
    assert moved(learner.teacher, before) == [] and moved(learner.network.backbone, snapshot(learner.teacher.backbone))
    assert not any(p.requires_grad for p in learner.teacher.parameters())


@pytest.mark.parametrize(
    "name, keys, shares",
    [("icarl", {"distill": 0.5}, (1, 0.5)), ("wa", {}, (3 / 7, 4 / 7)), ("bic", {}, (3 / 7, 4 / 7))],
)
def test_the_loss_is_cross_entropy_and_distillation_in_the_methods_proportion(name, keys, shares, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path, T=3.0, **keys)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    torch.testing.assert_close(logits, learner.network(BATCH))
    old = -((learner.teacher(BATCH) / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, shares[0] * negative_log_likelihood(logits, TARGETS) + shares[1] * old)
    itself = -((logits[:, :4] / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    assert (old - itself).abs() > 1e-3, "the teacher differs from the network"


def test_finetunes_loss_is_cross_entropy_over_the_new_classes(digits, tmp_path):
    learner, tasks = grown("finetune", 2, digits, tmp_path)
    learner.begin_task(tasks[1])
    learner.eval()
    targets = torch.tensor([4, 6, 5, 4, 5, 6])
    loss, logits = learner.loss(batch_of(BATCH, targets))
    assert logits.shape == (6, 7)
    torch.testing.assert_close(loss, negative_log_likelihood(logits[:, 4:], targets - 4))
    loss.backward()
    gradient = learner.network.head.weight.grad
    assert not gradient[:4].any() and gradient[4:].all()


@pytest.mark.parametrize("name", ["wa", "der", "memo"])
def test_aligned_heads_have_equal_mean_norms_before_exemplars_are_chosen(name, digits, tmp_path):
    learner, tasks = after(name, 1, digits, tmp_path)
    seen = {}
    learner.memory.update = lambda *_: seen.update(norms=learner.network.head.weight.detach().norm(dim=1))
    learner.learn(tasks[1], SILENT)
    assert seen["norms"][:4].mean().item() == pytest.approx(seen["norms"][4:].mean().item(), rel=1e-5)


def test_alignment_scales_new_rows_alone_and_no_bias():
    head = IncrementalHead(5, 4)
    head.grow(7)
    perturb(head)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.align(4, factor=2.0)
    assert torch.equal(head.weight[:4], weight[:4]) and torch.equal(head.bias, bias) and bias.all()
    old, new = (sum(math.hypot(*row) for row in rows.tolist()) / len(rows) for rows in (weight[:4], weight[4:]))
    torch.testing.assert_close(head.weight[4:], 2 * old / new * weight[4:])


# ---- BiC -------------------------------------------------------------------------------------------------------------


def test_bics_second_phase_changes_the_newest_logits_alone(digits, tmp_path):
    learner, tasks = after("bic", 2, digits, tmp_path)
    task = tasks[2]
    grow_for(learner, task)
    _, correction = learner.phases(task)
    before = snapshot(learner.network)
    with torch.no_grad():
        features = learner.network.extract(images())
        old = learner.network.classify(features)
    loop.fit(learner, task, budget.planned(learner, task, 1, correction), 0, SILENT)
    changed = [name for name in moved(learner.network, before) if "running" not in name and "num_batches" not in name]
    assert changed == ["corrections.2"], (
        "batch norm's statistics drift, as in PyCIL; of the weights only the newest pair moves"
    )
    with torch.no_grad():
        new = learner.network.classify(features)
    assert torch.equal(new[:, :7], old[:, :7]) and not torch.equal(new[:, 7:], old[:, 7:])
    scale, shift = learner.network.corrections[2].detach()
    torch.testing.assert_close(new[:, 7:], scale * old[:, 7:] + shift)


def test_bics_correction_loss_is_cross_entropy_of_the_softmax_of_corrected_logits(digits, tmp_path):
    """The softmax is applied twice, as in PyCIL."""
    learner, _ = grown("bic", 2, digits, tmp_path)
    learner.eval()
    network = learner.network
    loss, logits = learner.correction_loss(batch_of(BATCH, TARGETS))
    raw = network.head(network.backbone(BATCH)).split([4, 3], 1)
    parts = [scale * part + shift for part, (scale, shift) in zip(raw, network.corrections, strict=True)]
    torch.testing.assert_close(logits, torch.cat(parts, 1))
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    torch.testing.assert_close(loss, negative_log_likelihood(probabilities, TARGETS))
    loss.backward()
    assert all(parameter.grad is None for parameter in network.backbone.parameters())
    assert network.corrections[1].grad.all()


def test_bics_correction_sees_as_many_images_of_each_class_whatever_the_replay_ratio(digits, tmp_path):
    learner, tasks = after("bic", 1, digits, tmp_path, replay_ratio=0.9, memory_per_class=20, memory_size=200)
    seen = {"train": [], "bias correction": []}
    phases = learner.phases

    def watched(task):
        for phase in phases(task):
            loss, name = phase.loss, phase.name
            yield replace(phase, loss=lambda batch: seen[name].append(batch.targets) or loss(batch))

    learner.phases = watched
    learner.learn(tasks[1], SILENT)
    mixed, balanced = (torch.bincount(torch.cat(targets)) for targets in seen.values())
    assert len(set(balanced.tolist())) == 1 and balanced[0] > 0 and len(set(mixed.tolist())) > 1


def test_gradients_from_before_a_phase_do_not_enter_its_first_step(digits, tmp_path):
    weights = []
    for left in (0.0, 100.0):
        learner, tasks = after("replay", 1, digits, tmp_path)
        for parameter in learner.parameters():
            parameter.grad = torch.full_like(parameter, left)
        learner.learn(tasks[1], SILENT)
        weights.append(learner.network.head.weight.detach().clone())
    assert torch.equal(*weights)


def hundred_classes():
    """CIFAR-100's numbers, with images of a pixel."""
    info = DatasetInfo("hundred", tuple(map(str, range(100))), 1, (0.5,) * 3, (0.5,) * 3, "pad", 0, False, 0.0)
    split = Split(np.zeros((50_000, 1, 1, 3), np.uint8), np.repeat(np.arange(100), 500))
    return Dataset(info, split, split)


@pytest.mark.parametrize(
    "keys, sizes",
    [
        ({"memory_per_class": 20}, [20, 10, 6, 5, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 500}, [20, 10, 6, 5, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 200, "validation": "per_class"}, [20] * 9),
        ({"memory_per_class": "all", "validation": "per_class"}, [50] * 9),
        ({"memory_per_class": 4, "validation": "per_class"}, [1] * 9),
        ({"memory_per_class": 2, "validation": "per_class"}, [1] * 9),
        ({"memory_per_class": 1, "validation": "per_class"}, [0] * 9),
        ({"memory_per_class": 4}, [4, 4, 4, 4, 4, 3, 2, 2, 2]),
        ({"memory_per_class": 0}, [0] * 9),
    ],
)
def test_bic_holds_out_as_pycil_does_and_no_more_than_there_is(keys, sizes, tmp_path):
    run = Run(
        resolve(SMALL | {"model_name": "bic", "out": str(tmp_path), "init_cls": 10, "increment": 10} | keys),
        hundred_classes(),
    )
    learner, targets, found = run.learner, run.manager.train_targets, []
    for task in run.manager.tasks:
        held_out = learner.validation_samples(task)
        counts = np.bincount(targets[held_out], minlength=task.num_seen)
        assert len(set(held_out)) == len(held_out) and (counts == counts[0]).all()
        assert set(held_out) <= set(learner.batches.indices(task))
        found.append(int(counts[0]))
        learner.memory.update(task, targets, None, np.random.default_rng(0))
    assert found[1:] == sizes and found[0] == 0


# ---- expanding learners ----------------------------------------------------------------------------------------------


def test_ders_old_backbones_do_not_move_and_its_features_stand_in_order(digits, tmp_path):
    learner, tasks = after("der", 2, digits, tmp_path)
    blocks = [snapshot(block) for block in learner.network.blocks]
    learner.eval()
    old_features = learner.extract(images())
    learner.learn(tasks[2], SILENT)
    network = learner.network
    assert len(network.blocks) == 3 and [moved(block, state) for block, state in zip(network.blocks, blocks)] == [
        [],
        [],
    ]
    assert moved(network.blocks[2], blocks[1]), "the newest began as a copy and has learned"
    learner.eval()
    features = learner.extract(images())
    torch.testing.assert_close(features[:, :128], old_features)
    torch.testing.assert_close(features[:, 128:], network.blocks[2](images()))
    torch.testing.assert_close(learner.classify(features), features @ network.head.weight.T + network.head.bias)


@pytest.mark.parametrize("name", ["der", "memo"])
def test_the_auxiliary_heads_loss_is_added_from_the_second_task_on(name, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path, alpha_aux=0.7)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    shared = learner.network.trunk(BATCH)
    features = [block(shared) for block in learner.network.blocks]
    torch.testing.assert_close(logits, learner.network.head(torch.cat(features, 1)))
    newest = learner.network.aux_head(features[1])
    assert newest.shape == (6, 1 + 3), "the old classes are one"
    auxiliary = negative_log_likelihood(newest, torch.tensor([0, 3, 0, 0, 2, 1]))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS) + 0.7 * auxiliary)
    first, _ = grown(name, 1, digits, tmp_path, alpha_aux=0.7)
    first.eval()
    loss, logits = first.loss(batch_of(BATCH, TARGETS % 4))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS % 4))


def test_the_head_of_an_expanding_net_keeps_old_rows_on_old_features(digits, tmp_path):
    learner, tasks = grown("der", 2, digits, tmp_path)
    head = copy.deepcopy(learner.network.head)
    grow_for(learner, tasks[2])
    new = learner.network.head
    assert (
        new.weight.shape == (10, 192)
        and torch.equal(new.weight[:7, :128], head.weight)
        and torch.equal(new.bias[:7], head.bias)
    )
    assert new.weight[7:].abs().max() <= math.sqrt(3 / 192) and new.weight[:7, 128:].abs().max() <= math.sqrt(3 / 192)


@pytest.mark.parametrize("name", ["der", "memo", "foster"])
def test_parts_that_do_not_learn_stay_in_evaluation_mode(name, digits, tmp_path):
    learner, _ = grown(name, 2, digits, tmp_path)
    learner.network.train()
    assert [block.training for block in learner.network.blocks] == [False, True]
    assert learner.network.trunk.training == (name == "memo")


def step_flops(learner, batch):
    learner.eval(), learner.network.train()
    with FlopCounterMode(display=False) as counter:
        learner.loss(batch_of(batch, torch.zeros(len(batch), dtype=torch.int64)))[0].backward()
    return counter.get_total_flops()


def test_an_old_backbone_of_der_costs_one_forward_pass(digits, tmp_path):
    learner, tasks = grown("der", 2, digits, tmp_path)
    two = step_flops(learner, images())
    grow_for(learner, tasks[2])
    three = step_flops(learner, images())
    with FlopCounterMode(display=False) as counter:
        learner.network.blocks[0](images())
    assert counter.get_total_flops() < three - two < 1.01 * counter.get_total_flops()


def test_memos_trunk_is_shared_runs_once_and_goes_on_learning(digits, tmp_path):
    learner, tasks = after("memo", 1, digits, tmp_path)
    trunk, block, calls = snapshot(learner.network.trunk), snapshot(learner.network.blocks[0]), []
    learner.learn(tasks[1], SILENT)
    assert moved(learner.network.blocks[0], block) == [] and "0.0.weight" in moved(learner.network.trunk, trunk)
    learner.network.trunk.register_forward_hook(lambda *_: calls.append(1))
    learner.network(images())
    assert len(calls) == 1


def test_memos_trunk_learns_through_the_old_blocks_too(digits, tmp_path):
    """As in PyCIL: an old block's weights are frozen, not the way through it."""
    learner, _ = grown("memo", 2, digits, tmp_path)
    with torch.no_grad():
        learner.network.head.weight[:, 64:] = 0  # the newest block has no effect
    learner.network.classify(learner.network.extract(images())).sum().backward()
    assert learner.network.trunk[0][0].weight.grad.abs().sum() > 0


def test_memo_can_keep_its_trunk_or_train_its_old_blocks(digits, tmp_path):
    learner, tasks = after("memo", 1, digits, tmp_path, train_base=False, train_adaptive=True)
    trunk, block = snapshot(learner.network.trunk), snapshot(learner.network.blocks[0])
    learner.learn(tasks[1], SILENT)
    assert moved(learner.network.trunk, trunk) == [] and moved(learner.network.blocks[0], block)


def test_memos_parts_have_the_published_sizes():
    sizes = {}
    for name in ("resnet32", "resnet18"):
        network = ExpandingNet(make_backbone(name), share_trunk=True)
        sizes[name] = [sum(p.numel() for p in part.parameters()) for part in (network.trunk, network.blocks[0])]
    assert sizes == {"resnet32": [112_016, 351_488], "resnet18": [11_176_512 - 8_393_728, 8_393_728]}


# ---- FOSTER ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fosters_student_is_the_next_first_backbone_and_smaller_than_the_teacher(digits, tmp_path):
    learner, tasks = after("foster", 1, digits, tmp_path)
    old = snapshot(learner.network.blocks[0])
    learner.learn(tasks[1], SILENT)
    assert len(learner.network.blocks) == 2 and len(learner.student.blocks) == 1
    assert moved(learner.network.blocks[0], old) == [] and moved(learner.student.blocks[0], old), (
        "the student starts there and learns"
    )
    size = {
        name: sum(p.numel() for p in net.parameters())
        for name, net in (("teacher", learner.network), ("student", learner.student))
    }
    assert size["student"] < 0.6 * size["teacher"]
    student = snapshot(learner.student.blocks[0])
    learner.learn(tasks[2], SILENT)
    assert len(learner.network.blocks) == 2 and moved(learner.network.blocks[0], student) == []


def test_fosters_student_starts_with_the_old_backbone_and_head(digits, tmp_path):
    learner, tasks = after("foster", 1, digits, tmp_path)
    learner.eval()
    before = learner.network(images())
    grow_for(learner, tasks[1])
    learner.eval()
    torch.testing.assert_close(learner.student(images())[:, :4], before)


def test_fosters_loss_divides_logits_by_weights_and_distils_the_old_head(digits, tmp_path):
    learner, tasks = after("foster", 1, digits, tmp_path, lambda_okd=0.5, T=3.0)
    grow_for(learner, tasks[1])
    next(learner.phases(tasks[1]))
    perturb(learner.network)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    newest = learner.network.aux_head(learner.network.blocks[1](BATCH))
    old = learner.old_head(learner.network.blocks[0](BATCH))
    distilled = -((old / 3).softmax(1) * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    new = negative_log_likelihood(logits / learner.weights, TARGETS) + negative_log_likelihood(newest, TARGETS)
    torch.testing.assert_close(loss, new + 0.5 * distilled)
    counts = np.bincount(learner.manager.train_targets[learner.batches.indices(tasks[1])])
    assert counts[:4].tolist() == [10] * 4 and torch.equal(
        learner.weights, balanced_weights(torch.tensor(counts), 0.96)
    )


def test_fosters_compression_distils_the_teacher_with_rare_classes_weighted(digits, tmp_path):
    keys = {"beta2": 0.9, "T": 3.0, "compression_epochs": 5, "compression_weight_decay": 0.25}
    learner, tasks = after("foster", 1, digits, tmp_path, **keys)
    grow_for(learner, tasks[1])
    _, compression = learner.phases(tasks[1])
    assert compression.network is learner.student and compression.epochs == 5
    groups = compression.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.25}
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in learner.student.parameters()}
    perturb(learner)
    learner.eval()
    loss, logits = compression.loss(batch_of(BATCH, TARGETS))
    torch.testing.assert_close(logits, learner.student.head(learner.student.blocks[0](BATCH)))
    counts = np.bincount(learner.manager.train_targets[learner.batches.indices(tasks[1])])
    weights = torch.tensor([(1 - 0.9) / (1 - 0.9 ** int(count)) for count in counts])
    soft = (learner.network(BATCH) / 3).softmax(1) * weights
    soft = soft / soft.sum(1, keepdim=True)
    torch.testing.assert_close(loss, -(soft * (logits / 3).log_softmax(1)).sum(1).mean())
    loss.backward()
    assert all(parameter.grad is None for parameter in learner.network.parameters())


def test_fosters_heads_are_aligned_to_wa_value_to_the_power_of_old_over_new_classes(digits, tmp_path):
    """The teacher's between the phases, the student's after them."""
    aligned = {"is_teacher_wa": True, "is_student_wa": True}
    for keys, expected in ((aligned, 2 ** (4 / 3)), ({}, None)):
        learner, tasks = after("foster", 1, digits, tmp_path, wa_value=2.0, **keys)
        grow_for(learner, tasks[1])
        perturb(learner)
        heads, found = (learner.network.head, learner.student.head), []
        for _ in learner.phases(tasks[1]):
            found.append(list(map(new_over_old, heads)))
        (teacher, student), ended = found[0], list(map(new_over_old, heads))
        assert found[1] == [pytest.approx(expected or teacher), student]
        assert ended == [pytest.approx(expected or teacher), pytest.approx(expected or student)]
        assert teacher < 2 and student < 2


def new_over_old(head):
    """The mean norm of the head's rows of new classes over that of the four old ones."""
    norms = head.weight.detach().norm(dim=1)
    return (norms[4:].mean() / norms[:4].mean()).item()


@pytest.mark.slow
def test_foster_az_keeps_new_classes_off_old_features(digits, tmp_path):
    weight = after("foster", 2, digits, tmp_path, oofc="az")[0].network.head.weight
    assert not weight[4:, :64].any() and weight[4:, 64:].all()
    assert after("foster", 2, digits, tmp_path)[0].network.head.weight[4:, :64].any()


# ---- full retraining -------------------------------------------------------------------------------------------------


def test_joint_forgets_its_weights_and_not_its_memory(digits, tmp_path):
    learner, tasks = after("joint", 1, digits, tmp_path)
    before, memory = snapshot(learner.network), learner.memory.indices.copy()
    grow_for(learner, tasks[1])
    assert np.array_equal(learner.memory.indices, memory) and len(memory) == 40
    assert not torch.equal(learner.network.backbone.stem[0].weight, before["backbone.stem.0.weight"])
    fresh = learner.network.backbone.stem[1]
    assert torch.equal(fresh.running_mean, torch.zeros(16)) and torch.equal(fresh.weight, torch.ones(16))
    assert learner.network.head.out_features == 7
