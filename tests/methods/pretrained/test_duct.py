"""DUCT: its merged backbone and head, against slow twins of PILOT's arithmetic."""

import math

import pytest
import torch
from reference import pilot
from reference.transport import sinkhorn
from support.methods import after, grown

from pycil_wsc.training.learner import grow_for

KEYS = {"init_cls": 3, "increment": 3, "precision": "fp32"}


def test_ducts_backbone_is_the_initial_one_with_the_weighted_changes_of_all_tasks(digits, tmp_path):
    learner, tasks = after("duct", 1, digits, tmp_path, **KEYS)
    initial = learner.initial.state_dict()
    first = {name: value.clone() for name, value in learner.change.items()}
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    for name, value in learner.network.backbone.state_dict().items():
        assert torch.equal(value, initial[name]), "each task trains the initial backbone"
    with torch.no_grad():
        for parameter in learner.network.backbone.parameters():
            parameter += 0.01
    cosines = [
        torch.cosine_similarity(learner.means[label], mean, dim=0).item() for label, mean in learner.new_means(tasks[1])
    ]
    assert len(cosines) == 3
    learner.merge_backbone(tasks[1])
    name = next(name for name, _ in learner.network.backbone.named_parameters())
    expected = initial[name] + first[name] + 0.25 * sum(cosines) / 3 * 0.01
    torch.testing.assert_close(learner.network.backbone.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


def test_ducts_old_rows_move_towards_the_new_ones_by_optimal_transport(digits, tmp_path):
    learner, tasks = grown("duct", 2, digits, tmp_path, ot_reg=0.5, **KEYS)
    learner.means.copy_(0.3 * torch.randn(6, learner.means.shape[1], generator=torch.Generator().manual_seed(0)))
    before = learner.network.head.weight.tolist()
    learner.merge_head(tasks[1])
    means = learner.means.double().tolist()
    costs = [[math.dist(means[new], means[old]) for old in range(3)] for new in range(3, 6)]
    plan = sinkhorn(costs, [1 / 3] * 3, [1 / 3] * 3, 0.5)
    expected = pilot.transported((before[:3], before[3:]), plan, 0.25) + before[3:]
    torch.testing.assert_close(learner.network.head.weight, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_ducts_rate_is_a_third_in_its_first_five_epochs(digits, tmp_path):
    learner, tasks = grown("duct", 1, digits, tmp_path, lr_re=0.3, epc_re=7, **KEYS)
    retraining = learner.retraining(tasks[0])
    assert [retraining.lr(epoch) for epoch in (0, 4, 5)] == pytest.approx([0.1, 0.1, 0.3])
    assert retraining.network is learner.network.head
