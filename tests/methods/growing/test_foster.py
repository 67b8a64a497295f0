"""FOSTER: boosting, compression and the weights of rare classes, against closed forms."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.methods import BATCH, SILENT, TARGETS, after, images, moved, negative_log_likelihood, perturb, snapshot
from support.small_runs import batch_of

from pycil_wsc.methods.losses import balanced_weights
from pycil_wsc.training.learner import grow_for


@pytest.mark.parametrize("memory, ratio", [(20, 1.79), (80, 1.04), (200, 1.00), (500, 1.00)])
def test_fosters_class_weights_are_the_known_ones(memory, ratio):
    weights = balanced_weights(torch.tensor([memory] * 10 + [500] * 10), 0.96)
    assert (weights[0] / weights[-1]).item() == pytest.approx(ratio, abs=0.005)
    assert weights.sum().item() == pytest.approx(20, abs=1e-3)


def test_a_class_without_samples_weighs_as_one_with_one():
    weights = balanced_weights(torch.tensor([0, 1, 500]), 0.97)
    assert weights[0] == weights[1] and weights.isfinite().all()


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
        for number, _ in enumerate(learner.phases(tasks[1])):
            found.append(list(map(new_over_old, heads)))
            learner.end_phase(tasks[1], SimpleNamespace(number=number))
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
